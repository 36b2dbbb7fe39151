"""Scores for requests that have no estimate yet (Section 5, Scheduler optimization)."""

from __future__ import annotations

import numpy as np


def prior_scores(acceptance: float, K: int) -> np.ndarray:
    """Scores [K] of a draft whose every position is accepted with one probability.

    The reward sum of p^j is concave, so its scores are p, p^2, ..., p^K.

    Raises:
        ValueError: acceptance outside (0, 1).
    """
    if not 0.0 < acceptance < 1.0:
        raise ValueError(f"schedule.prior_acceptance: got {acceptance!r}, want between 0 and 1")
    return np.power(acceptance, np.arange(1, K + 1)).astype(np.float32)


def fill_missing(
    g: np.ndarray,  # [R, K] scores; rows without an estimate hold anything
    known: np.ndarray,  # [R] bool
    prior: np.ndarray,  # [K]
) -> np.ndarray:
    """Scores [R, K] with unknown rows set to the mean of the known ones.

    No row known: every row is the prior. The mean of non-increasing rows is
    non-increasing. The input is not changed.
    """
    if known.all():
        return g
    filled = g.copy()
    filled[~known] = g[known].mean(axis=0) if known.any() else prior
    return filled
