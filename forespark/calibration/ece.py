"""Expected calibration error over equal-width bins."""

from __future__ import annotations

import math

import numpy as np


def ece(
    predicted: np.ndarray,  # [S] probabilities in [0, 1]
    happened: np.ndarray,  # [S] bool or 0/1
    bins: int = 15,
) -> float:
    """Sum over bins of (share of samples) * |mean prediction - observed rate|.

    Bin b covers [b / bins, (b + 1) / bins); a prediction of exactly 1 is in the last
    bin. Empty bins weigh nothing; one observed class is no special case.

    Returns:
        The error in [0, 1]; NaN without samples, since nothing was observed.

    Raises:
        ValueError: lengths differ, or a prediction is NaN or outside [0, 1].
    """
    predicted = np.asarray(predicted, dtype=np.float64)
    happened = np.asarray(happened, dtype=np.float64)
    if predicted.shape != happened.shape or predicted.ndim != 1 or bins < 1:
        raise ValueError(
            f"ECE: got {predicted.shape} predictions, {happened.shape} outcomes and {bins} bins; "
            "want one outcome per prediction and at least one bin"
        )
    if not len(predicted):
        return math.nan
    if not (predicted.min() >= 0 and predicted.max() <= 1):
        raise ValueError("ECE: predictions must be probabilities in [0, 1], none of them NaN")
    at = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    # |sum of predictions - sum of outcomes| is the bin's count times its error.
    excess = np.bincount(at, weights=predicted - happened, minlength=bins)
    return float(np.abs(excess).sum() / len(predicted))
