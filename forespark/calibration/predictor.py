"""How well the pre-draft estimate predicts acceptance (paper, Section 6.5, Figure 12a).

From drafts of full length K, every position verified: the predicted number of accepted
tokens, R(K) of Section 4.2, against the number that was accepted, beside the simplest
forecast there is, the same request's previous step. Both are judged on the same drafts,
those whose previous step is in the trace too.

Calibrations compared:
    none     scale 1 and bias 0 everywhere;
    served   the run's calibration.json, fitted on its own prompts: unmatched where the
             trace holds other prompts;
    matched  fitted on the trace's own prompts, each request predicted by a fit that has
             not seen it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from forespark.calibration.ece import ece
from forespark.calibration.fit import fit_post, fit_pre
from forespark.calibration.traces import Drafts, graded, has_nan
from forespark.fore_d.calibrated import Calibration

FOLDS = 4  # of the matched calibration
RESAMPLES = 1000  # of the bootstrap, over requests
ERRORS = 0.25  # tokens between two points of the error curve


@dataclass(frozen=True)
class FullBlocks:
    """Fully verified drafts of length K in the order of the trace."""

    request: np.ndarray  # [S] int64, requests numbered by first appearance
    accepted: np.ndarray  # [S] int64, 0..K
    previous: np.ndarray  # [S] int64, accepted one step earlier; -1: not known
    z: np.ndarray  # [S, K] pre-draft logits of row K
    l: np.ndarray  # [S, K] post-draft logits  # noqa: E741

    def drafts(self, kept: np.ndarray) -> Drafts:
        """Those of the mask ``kept`` [S], as the calibration fits take them."""
        return Drafts(self.accepted[kept], self.z[kept], self.l[kept])


def read_full_blocks(path: Path, wanted: Mapping[str, Any]) -> FullBlocks:
    """Length-K drafts of one trace with their predecessors.

    Args:
        path: trace of a run at forced length K with details.
        wanted: CALIBRATION_KEY fields of the drafter.

    Raises:
        ValueError: no such drafts, or a trace of something else; names the file.
    """
    K = int(wanted["K"])
    numbers: dict[str, int] = {}
    ends: dict[str, tuple[int, int]] = {}  # request -> (next anchor, accepted)
    rows: list[tuple[int, int, int]] = []
    logits: list[tuple[list[float], list[float]]] = []
    for draft in graded(path, wanted, set()):
        name, position = draft["id"], draft["pos"]
        expected, before = ends.get(name, (-1, -1))
        full = draft["d"] == K == draft["v"]
        # A shorter draft, or one cut in verification, does not tell how far K would have got.
        ends[name] = (position + draft["a"] + 1, draft["a"] if full else -1)
        if not full or has_nan(draft):
            continue
        if draft.get("z") is None or draft.get("l") is None:
            raise ValueError(
                f"{path}: a draft of length {K} has no logits of both estimators; trace a drafter "
                "that has them, with serve.trace_detail=true"
            )
        number = numbers.setdefault(name, len(numbers))
        rows.append((number, draft["a"], before if expected == position else -1))
        logits.append((draft["z"], draft["l"]))
    if not any(row[2] >= 0 for row in rows):
        raise ValueError(
            f"{path}: no two successive drafts of length {K}, all verified; trace a run with "
            f"serve.force_length={K} serve.trace_detail=true"
        )
    request, accepted, previous = np.array(rows, dtype=np.int64).T
    pre, post = (np.array([pair[i] for pair in logits], dtype=np.float64) for i in (0, 1))
    return FullBlocks(request, accepted, previous, pre, post)


def survival(
    logits: np.ndarray,  # [S, K] conditional acceptance logits
    scale: np.ndarray,  # [K] or [S, K]
    bias: np.ndarray,  # [K] or [S, K]
) -> np.ndarray:
    """Probability that positions 1..j are all accepted, [S, K]."""
    return np.asarray(expit(logits * scale + bias).cumprod(axis=1))


def matched(
    blocks: FullBlocks, min_samples: int, bins: int
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """((scale, bias), 1/theta), each [S, K], fitted on the other requests' drafts."""
    K = blocks.z.shape[1]
    scale, bias, inverse = (np.empty_like(blocks.z) for _ in range(3))
    for fold in range(FOLDS):
        mine = blocks.request % FOLDS == fold
        others = blocks.drafts(~mine)
        pre = fit_pre({K: others}, K, "row", bins, min_samples)
        post = fit_post(blocks.l[~mine], others.accepted, bins, min_samples=min_samples)
        scale[mine], bias[mine] = pre.scale[0], pre.bias[0]
        inverse[mine] = 1.0 / np.asarray(post.theta)
    return (scale, bias), inverse


def calibrated_survival(
    blocks: FullBlocks, calibration: Calibration, min_samples: int, bins: int
) -> dict[str, dict[str, np.ndarray]]:
    """Survival [S, K] by estimator (pre, post) and calibration (none, served, matched)."""
    K = blocks.z.shape[1]
    one, zero = np.ones(K), np.zeros(K)
    (scale, bias), inverse = matched(blocks, min_samples, bins)
    assert calibration.pre is not None
    theta = np.asarray(calibration.post.theta)
    served = np.asarray(calibration.pre.scale[-1]), np.asarray(calibration.pre.bias[-1])
    return {
        "pre": {
            "none": survival(blocks.z, one, zero),
            "served": survival(blocks.z, *served),
            "matched": survival(blocks.z, scale, bias),
        },
        "post": {
            "none": survival(blocks.l, one, zero),
            "served": survival(blocks.l, 1.0 / theta, zero),
            "matched": survival(blocks.l, inverse, zero),
        },
    }


def judge(
    predicted: np.ndarray,  # [P] tokens
    accepted: np.ndarray,  # [P] tokens
    thresholds: np.ndarray,  # [E] tokens
) -> dict[str, Any]:
    """Mean absolute error, share within one token, and share within each threshold."""
    error = np.abs(predicted - accepted)
    # A prediction made of sums may miss a whole token's distance by rounding.
    within = (error[:, None] <= thresholds + 1e-9).mean(axis=0)
    return {
        "mae": float(error.mean()),
        "within_one": float((error <= 1 + 1e-9).mean()),
        "within": [float(share) for share in within],
    }


def mae_ratio(
    predicted: np.ndarray,  # [P]
    baseline: np.ndarray,  # [P]
    accepted: np.ndarray,  # [P]
    request: np.ndarray,  # [P]
    seed: int = 0,
) -> dict[str, Any]:
    """Ratio of mean absolute errors and its 95 % bootstrap interval over requests."""
    _, number = np.unique(request, return_inverse=True)
    own, other = (
        np.bincount(number, weights=np.abs(guess - accepted)) for guess in (predicted, baseline)
    )
    if not other.sum():
        return {"ratio": None, "interval": None}  # the baseline makes no error
    ratio = float(own.sum() / other.sum())
    picks = np.random.default_rng(seed).integers(len(own), size=(RESAMPLES, len(own)))
    bases = other[picks].sum(axis=1)
    if not bases.all():
        return {"ratio": ratio, "interval": None}  # too few requests to resample
    low, high = np.quantile(own[picks].sum(axis=1) / bases, [0.025, 0.975])
    return {"ratio": ratio, "interval": [float(low), float(high)]}


def reliability(
    predicted: np.ndarray,  # [S, K] survival
    accepted: np.ndarray,  # [S]
    bins: int,
) -> dict[str, Any]:
    """Diagram over all positions, [drafts, mean prediction, observed rate] a bin, and ECE."""
    K = predicted.shape[1]
    happened = accepted[:, None] > np.arange(K)
    at = np.minimum((predicted * bins).astype(np.int64), bins - 1).ravel()
    count = np.bincount(at, minlength=bins)
    sums = [np.bincount(at, weights=x.ravel(), minlength=bins) for x in (predicted, happened)]
    rows = [
        [int(n), float(p / n), float(h / n)] if n else [0, None, None]
        for n, p, h in zip(count, *sums, strict=True)
    ]
    return {
        "bins": rows,
        "ece": ece(predicted.ravel(), happened.ravel(), bins),
        "ece_by_position": [ece(predicted[:, j], happened[:, j], bins) for j in range(K)],
    }


def expected_error(S: np.ndarray) -> float:
    """Mean |R - A| if A were drawn from the predicted distribution, [S, K] -> tokens.

    What is left of the error when the estimate is exactly right for the features it sees.
    """
    edges = np.concatenate([np.ones((len(S), 1)), S, np.zeros((len(S), 1))], axis=1)
    probability = edges[:, :-1] - edges[:, 1:]  # of A = 0..K
    distance = np.abs(S.sum(axis=1, keepdims=True) - np.arange(S.shape[1] + 1))
    return float((probability * distance).sum(axis=1).mean())


def compare(
    blocks: FullBlocks, calibration: Calibration, min_samples: int = 50, bins: int = 15
) -> dict[str, Any]:
    """Predictors, error curves and reliability of one trace, as JSON values.

    Predictors: ``previous`` (the request's last count); ``mean`` and ``constant`` (the trace's
    mean and median); ``none``/``served``/``matched``, R(K) of the pre-draft estimate by
    calibration; ``median``, the served estimate's median count, which is the better guess
    where the absolute error counts; and ``after``, R(K) of the matched post-draft estimate,
    which has seen the drafts: what features before drafting cannot be expected to beat.
    """
    K = blocks.z.shape[1]
    curves = calibrated_survival(blocks, calibration, min_samples, bins)
    pairs = blocks.previous >= 0
    accepted, request = blocks.accepted[pairs], blocks.request[pairs]
    guesses = {name: S[pairs].sum(axis=1) for name, S in curves["pre"].items()}
    guesses["median"] = (curves["pre"]["served"][pairs] >= 0.5).sum(axis=1).astype(float)
    guesses["after"] = curves["post"]["matched"][pairs].sum(axis=1)
    guesses["previous"] = blocks.previous[pairs].astype(float)
    guesses["mean"] = np.full(len(accepted), blocks.accepted.mean())
    guesses["constant"] = np.full(len(accepted), np.median(blocks.accepted))
    thresholds = np.arange(0, K + ERRORS, ERRORS)
    return {
        "requests": int(blocks.request.max()) + 1,
        "drafts": len(blocks.accepted),
        "pairs": int(pairs.sum()),
        "mean_accepted": float(accepted.mean()),
        "errors": [float(t) for t in thresholds],
        "predictors": {name: judge(g, accepted, thresholds) for name, g in guesses.items()},
        "mae_ratio": {
            name: mae_ratio(guesses[name], guesses["previous"], accepted, request)
            for name in ("none", "served", "matched", "median", "after", "mean", "constant")
        },
        "expected_mae": expected_error(curves["pre"]["matched"][pairs]),
        "reliability": {
            estimator: {name: reliability(S, blocks.accepted, bins) for name, S in parts.items()}
            for estimator, parts in curves.items()
        },
    }
