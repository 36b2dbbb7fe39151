"""Exhaustive search over all schedules, the optimum the joint schedule is held against.

Unlike the envelope, it values a schedule by each request's own length-d survival curve:
n plus the B largest survivals among the drafted positions (Section 6.4, Exhaustive).
It visits (K + 1)^n schedules: small batches only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from forespark.fore_d.costs import CostTables

LIMIT = 2_000_000  # schedules


def schedule_value(
    survival: np.ndarray,  # [n, K, K]
    lengths: Sequence[int],  # [n]
    budget: int,
    N: int,
    costs: CostTables,
    price_other: bool = True,
) -> float:
    """Expected tokens per millisecond of drafting ``lengths`` and verifying ``budget``.

    Raises:
        ValueError: budget outside 0..sum of lengths.
    """
    if not 0 <= budget <= sum(lengths):
        raise ValueError(f"budget: got {budget}, want 0..{sum(lengths)} (drafted tokens)")
    n = len(lengths)
    drafted = _drafted(survival, lengths)
    tokens = sum(d + 1 for d in lengths if d)
    other = costs.other_ms(n) if price_other else 0.0
    step = costs.draft_ms(tokens) + costs.verify_ms(N + budget, n) + other
    return float((n + drafted[:budget].sum()) / step)


def _drafted(survival: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Survivals of all drafted positions, descending."""
    curves = [survival[i, d - 1, :d] for i, d in enumerate(lengths) if d]
    return np.sort(np.concatenate(curves))[::-1] if curves else np.zeros(0)


def exhaustive(
    survival: np.ndarray,  # [n, K, K], no NaN
    N: int,
    costs: CostTables,
    price_other: bool = True,
) -> tuple[tuple[int, ...], int, float]:
    """Best (lengths, B, objective) over every length of every request and every B.

    Raises:
        ValueError: more than ``LIMIT`` schedules.
    """
    n, K = survival.shape[:2]
    if (K + 1) ** n > LIMIT:
        raise ValueError(
            f"exhaustive search: got {n} requests with K={K}, {(K + 1) ** n} schedules; "
            f"want at most {LIMIT}. Use fewer requests"
        )
    other = costs.other_ms(n) if price_other else 0.0
    verify = np.array([costs.verify_ms(N + b, n) for b in range(n * K + 1)])
    best: tuple[tuple[int, ...], int, float] = ((0,) * n, 0, -1.0)
    for lengths in itertools.product(range(K + 1), repeat=n):
        gain = n + np.concatenate([[0.0], np.cumsum(_drafted(survival, lengths))])
        draft = costs.draft_ms(sum(d + 1 for d in lengths if d))
        value = gain / (draft + verify[: len(gain)] + other)
        top = int(value.argmax())
        if value[top] > best[2]:
            best = (lengths, top, float(value[top]))
    return best
