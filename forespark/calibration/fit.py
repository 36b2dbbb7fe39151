"""Calibration of both estimators from fully verified drafts (Appendix B).

Post-draft: one temperature per position, found one position at a time by minimal ECE of
the running-product survival (Eq. 6). Pre-draft: scale and bias per entry (d, j) by
logistic regression over the drafts of exactly length d whose first j-1 tokens were
accepted.

An entry keeps scale 1 and gets only a shrunken bias when it has fewer than
``min_samples`` drafts, when all its outcomes agree, or when its fitted scale is not
positive: a negative scale would turn the estimator's ranking of requests upside down,
which is sampling noise or a broken estimator, never something to serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from forespark.calibration.ece import ece
from forespark.calibration.traces import Drafts, Traces
from forespark.fore_d.calibrated import (
    COMMAND,
    Calibration,
    Curve,
    PostCalibration,
    PreCalibration,
)

# Weight of the pull towards scale 1 and bias 0, in units of one sample: nothing beside
# ``min_samples`` drafts, enough to keep separable outcomes finite.
PULL = 1.0


def fit_all(
    traces: Traces,  # drafts of length K at least; of every length for a triangle
    key: Mapping[str, Any],  # CALIBRATION_KEY fields
    bins: int = 15,
    grid_points: int = 41,
    min_samples: int = 50,
) -> Calibration:
    """Both fits of one drafter; without pre-draft logits (``form`` None) the first alone.

    Raises:
        ValueError: no length-K drafts with post-draft logits, or a fit's own refusal.
    """
    K = int(key["K"])
    full = traces.drafts.get(K)
    if full is None or full.l is None:
        raise ValueError(
            f"no fully verified drafts of length {K} with post-draft logits in the traces; "
            f"run `{COMMAND} --target {key.get('target')}`"
        )
    temperatures = fit_post(full.l, full.accepted, bins, grid_points, min_samples)
    if traces.form is None:
        return Calibration(dict(key), temperatures, None)
    entries = fit_pre(traces.drafts, K, traces.form, bins, min_samples)
    return Calibration(dict(key), temperatures, entries)


def theta_grid(points: int = 41, low: float = 0.1, high: float = 10.0) -> np.ndarray:
    """Candidate temperatures, evenly spaced in log(theta)."""
    return np.geomspace(low, high, points)


def _curve(values: list[float]) -> Curve:
    return [None if math.isnan(v) else float(v) for v in values]


def fit_post(
    logits: np.ndarray,  # [S, K] post-draft logits of length-K drafts
    accepted: np.ndarray,  # [S] accepted drafts A, 0..K
    bins: int = 15,
    grid_points: int = 41,
    min_samples: int = 1,
) -> PostCalibration:
    """Temperatures by Eq. (6).

    Equal errors go to the theta nearest 1. A position keeps theta 1 with fewer than
    ``min_samples`` drafts or with one outcome only: any direction would look better.

    Raises:
        ValueError: shapes disagree or a logit is NaN.
    """
    if logits.ndim != 2 or accepted.shape != logits.shape[:1] or np.isnan(logits).any():
        raise ValueError(
            f"post fit: got logits {logits.shape} and outcomes {accepted.shape}; want [S, K] "
            "without NaN and [S]"
        )
    grid = theta_grid(grid_points)
    grid = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    alive = raw = np.ones(len(logits))
    theta: list[float] = []
    before: list[float] = []
    after: list[float] = []
    for j in range(logits.shape[1]):
        reached = accepted >= j + 1
        raw = raw * expit(logits[:, j])
        before.append(ece(raw, reached, bins))
        chosen = 1.0
        if len(logits) >= min_samples and 0 < reached.sum() < len(reached):
            errors = [ece(alive * expit(logits[:, j] / t), reached, bins) for t in grid]
            chosen = float(grid[int(np.argmin(errors))])
        alive = alive * expit(logits[:, j] / chosen)
        theta.append(chosen)
        after.append(ece(alive, reached, bins))
    samples = [len(logits)] * logits.shape[1]
    return PostCalibration(theta, _curve(before), _curve(after), samples)


def fit_cell(
    z: np.ndarray,  # [S] logits of drafts whose first j-1 tokens were accepted
    happened: np.ndarray,  # [S] bool, token j accepted
    min_samples: int = 50,
) -> tuple[float, float, bool]:
    """(scale, bias, kept) of one entry; see the module docstring for ``kept``."""
    happened = happened.astype(np.float64)
    if len(z) >= max(min_samples, 1) and 0 < happened.sum() < len(z):
        scale, bias = _logistic(z, happened)
        if scale > 0:
            return scale, bias, False
    return 1.0, _shrunken_bias(z, happened, min_samples), True


def _logistic(z: np.ndarray, happened: np.ndarray) -> tuple[float, float]:
    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        scale, bias = parameters
        x = scale * z + bias
        value = np.logaddexp(0.0, x) - happened * x
        error = expit(x) - happened
        pull = np.array([scale - 1.0, bias])
        gradient = np.array([(error * z).sum(), error.sum()]) + PULL * pull
        total = value.sum() + 0.5 * PULL * (pull**2).sum()
        # Dividing by S keeps the optimiser's step sizes and stopping rule in one range.
        return total / len(z), gradient / len(z)

    found = minimize(loss, np.array([1.0, 0.0]), jac=True, method="BFGS")
    return float(found.x[0]), float(found.x[1])


def _shrunken_bias(z: np.ndarray, happened: np.ndarray, min_samples: int) -> float:
    """Bias whose mean prediction is the observed rate, pulled to the uncalibrated one.

    The estimator's own mean counts as ``min_samples`` further drafts, so few drafts
    move the bias little and one-class outcomes leave it finite.
    """
    if not len(z):
        return 0.0
    weight = max(min_samples, 1)
    wanted = (happened.sum() + weight * expit(z).mean()) / (len(z) + weight)
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if expit(z + middle).mean() < wanted else (low, middle)
    return 0.5 * (low + high)


def fit_pre(
    drafts: Mapping[int, Drafts],  # by draft length d; z [S, d] needed
    K: int,
    form: str = "triangle",
    bins: int = 15,
    min_samples: int = 50,
) -> PreCalibration:
    """Scale and bias of every entry, with ECE of survival per position before and after.

    ``row`` reads the length-K run only; a missing length leaves its row uncalibrated
    (kept, bias 0, 0 samples).

    Raises:
        ValueError: a run has no pre-draft logits, or logits of another length.
    """
    lengths = list(range(1, K + 1)) if form == "triangle" else [K]
    scale, bias, samples, kept = [], [], [], []
    for d in lengths:
        z, accepted = _pre_arrays(drafts.get(d), d)
        cells = []
        for j in range(d):
            reached = accepted >= j
            cells.append((*fit_cell(z[reached, j], accepted[reached] > j, min_samples), reached))
        scale.append([c[0] for c in cells])
        bias.append([c[1] for c in cells])
        kept.append([c[2] for c in cells])
        samples.append([int(c[3].sum()) for c in cells])
    ones, zeros = [[1.0] * len(r) for r in scale], [[0.0] * len(r) for r in scale]
    before = _pre_ece(drafts, lengths, ones, zeros, K, bins)
    after = _pre_ece(drafts, lengths, scale, bias, K, bins)
    return PreCalibration(form, scale, bias, samples, kept, before, after)


def _pre_arrays(runs: Drafts | None, d: int) -> tuple[np.ndarray, np.ndarray]:
    if runs is None:
        return np.zeros((0, d)), np.zeros(0, dtype=np.int64)
    if runs.z is None or runs.z.shape[1] != d:
        shape = None if runs.z is None else runs.z.shape
        raise ValueError(
            f"pre fit: drafts of length {d} carry pre-draft logits {shape}, want [S, {d}]; "
            "trace a drafter that has a pre-draft estimator"
        )
    return runs.z, runs.accepted


def _pre_ece(
    drafts: Mapping[int, Drafts],
    lengths: list[int],
    scale: list[list[float]],
    bias: list[list[float]],
    K: int,
    bins: int,
) -> Curve:
    """ECE of survival at position j = 1..K, pooled over the runs that reach it."""
    predicted: list[list[np.ndarray]] = [[] for _ in range(K)]
    happened: list[list[np.ndarray]] = [[] for _ in range(K)]
    for row, d in enumerate(lengths):
        z, accepted = _pre_arrays(drafts.get(d), d)
        S = expit(z * np.array(scale[row]) + np.array(bias[row])).cumprod(axis=1)
        for j in range(d):
            predicted[j].append(S[:, j])
            happened[j].append(accepted > j)
    return _curve(
        [
            ece(np.concatenate(p), np.concatenate(h), bins) if p else math.nan
            for p, h in zip(predicted, happened, strict=True)
        ]
    )
