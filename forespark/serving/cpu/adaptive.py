"""CPU twins of the online acceptance estimator behind vLLM's adaptive verification.

The estimator predicts whether the target accepts draft position k as
sigma(w f + beta_k), f the log-odds of the drafter's likeliest token. One slope w is shared by
all positions; coefficients are refitted by damped Newton steps on verified drafts.

Symbols: R = requests of the batch, S = request slots, K = draft length, N = rows scored,
V = tokens scored per row (the vocabulary, or the selector's candidates), b = blocks of V.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from forespark.serving.cpu.registry import twin
from forespark.serving.cpu.vocab import as_numpy32, block_max_sumexp

_ESTIMATOR = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator"


@twin(_ESTIMATOR, "_accumulate_kernel")
def accumulate(
    grid: tuple[int, ...],  # (K,)
    info: torch.Tensor,  # [K, 3] in place: sums of w f f, w f, w
    grad: torch.Tensor,  # [K, 2] in place: sums of residual f, residual
    idx_mapping: torch.Tensor,  # [R]
    num_sampled: torch.Tensor,  # [R] accepted drafts and one more; 0 while prefilling
    num_rejected: torch.Tensor,  # [R]
    features: torch.Tensor,  # [S, K]
    features_stride: int,
    pred: torch.Tensor,  # [S, K]
    pred_stride: int,
    counts: torch.Tensor,  # [K] in place
    num_reqs: int,
    BLOCK_R: int,
) -> None:
    """Add the last verification's verdicts to the Newton statistics.

    Accepted drafts are labelled 1 and the first refused one 0; what follows it was never
    judged.
    """
    _accumulate(
        info.numpy(),
        grad.numpy(),
        idx_mapping.numpy()[:num_reqs],
        num_sampled.numpy(),
        num_rejected.numpy(),
        features.numpy(),
        pred.numpy(),
        counts.numpy(),
    )


@njit(cache=True)
def _accumulate(info, grad, slots, num_sampled, num_rejected, features, predictions, counts):
    for r in range(slots.shape[0]):
        accepted = max(num_sampled[r] - 1, 0)
        judged = min(accepted + 1, accepted + num_rejected[r], counts.shape[0])
        for k in range(judged):
            f, p = features[slots[r], k], predictions[slots[r], k]
            weight = p * (np.float32(1.0) - p)
            residual = (np.float32(1.0) if k < accepted else np.float32(0.0)) - p
            info[k, 0] += weight * f * f
            info[k, 1] += weight * f
            info[k, 2] += weight
            grad[k, 0] += residual * f
            grad[k, 1] += residual
            counts[k] += np.float32(1.0)


@twin(_ESTIMATOR, "_refit_kernel")
def refit(
    grid: tuple[int, ...],  # (1,)
    slope: torch.Tensor,  # [1] in place
    intercepts: torch.Tensor,  # [K] in place
    info: torch.Tensor,  # [K, 3], zeroed
    info_row_stride: int,
    grad: torch.Tensor,  # [K, 2], zeroed
    grad_row_stride: int,
    counts: torch.Tensor,  # [K], zeroed
    NUM_SPECULATIVE_STEPS: int,
    L2: float,
    DAMPING: float,
    BLOCK: int,
) -> None:
    """One Newton step for the shared slope and the intercepts, then an empty round.

    The system is an arrowhead: eliminating the intercepts leaves one equation for the slope
    (a Schur complement). Each unknown is damped by n / (n + DAMPING), and a step that is NaN
    or would turn the slope negative is dropped.
    """
    a, b, c = info[:, 0].sum() + L2, info[:, 1], info[:, 2] + L2
    n = counts.clone()
    slope_step = (grad[:, 0].sum() - (b * grad[:, 1] / c).sum()) / (a - (b * b / c).sum())
    slope_step *= n.sum() / (n.sum() + DAMPING)
    if not bool(slope + slope_step >= 0.0):  # False for NaN too
        slope_step.zero_()
    slope += slope_step
    step = (grad[:, 1] - b * slope_step) / c * (n / (n + DAMPING))
    intercepts += step.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf"))
    for statistic in (info, grad, counts):
        statistic.zero_()


@twin(_ESTIMATOR, "_local_max_sumexp_kernel")
def local_max_sumexp(
    grid: tuple[int, ...],  # (N, b)
    local_max: torch.Tensor,  # [N, b] out
    local_max_stride: int,
    local_sumexp: torch.Tensor,  # [N, b] out
    local_sumexp_stride: int,
    logits: torch.Tensor,  # [N, V]
    logits_stride: int,
    idx_mapping: torch.Tensor,  # [N] request slot, -1 = padding
    idx_mapping_stride: int,
    temperature: torch.Tensor,  # [S]
    num_tokens: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Log-sum-exp parts of the distribution each row was drafted from.

    A greedy request's logits stay unscaled; a padded row is empty (-inf and 0).
    """
    _max_sumexp(
        as_numpy32(logits)[:num_tokens, :vocab_size],
        idx_mapping.numpy(),
        as_numpy32(temperature),
        BLOCK_SIZE,
        local_max.numpy(),
        local_sumexp.numpy(),
    )


@njit(cache=True)
def _max_sumexp(logits, slots, temperatures, block, maxima, sums):
    for row in range(logits.shape[0]):
        slot = slots[row]
        if slot < 0:
            maxima[row] = -np.inf
            sums[row] = 0.0
            continue
        temperature = temperatures[slot] if temperatures[slot] > 0.0 else np.float32(1.0)
        block_max_sumexp(logits[row], temperature, block, maxima[row], sums[row])


@twin(_ESTIMATOR, "_predict_kernel")
def predict(
    grid: tuple[int, ...],  # (N,)
    features: torch.Tensor,  # [S, K] out
    features_stride: int,
    pred: torch.Tensor,  # [S, K] out
    pred_stride: int,
    conf: torch.Tensor,  # [>= R, K] out, by batch position
    conf_stride: int,
    slope: torch.Tensor,  # [1]
    intercepts: torch.Tensor,  # [K]
    local_max: torch.Tensor,  # [N, b]
    local_max_stride: int,
    local_sumexp: torch.Tensor,  # [N, b]
    local_sumexp_stride: int,
    idx_mapping: torch.Tensor,  # [N] request slot, -1 = padding
    idx_mapping_stride: int,
    step: torch.Tensor,  # [N] with per_token_step, else a scalar
    num_tokens: int,
    vocab_num_blocks: int,
    per_token_step: bool,
    NUM_SPECULATIVE_STEPS: int,
    MAX_LOG_ODDS: float,
    PADDED_VOCAB_NUM_BLOCKS: int,
) -> None:
    """Feature and predicted acceptance of each drafted position.

    The feature scores the drafter's distribution, never the token drawn from it, so trimming
    by it keeps rejection sampling exact.
    """
    # A row's own step: the whole block was scored at once, K rows per request. One step for
    # all rows: one row per request.
    rows_per_request = NUM_SPECULATIVE_STEPS if per_token_step else 1
    _predict(
        features.numpy(),
        pred.numpy(),
        conf.numpy(),
        slope.numpy(),
        intercepts.numpy(),
        local_max.numpy()[:num_tokens],
        local_sumexp.numpy(),
        idx_mapping.numpy(),
        step.expand(num_tokens).numpy(),
        rows_per_request,
        np.float32(MAX_LOG_ODDS),
    )


@njit(cache=True)
def _predict(
    features, pred, conf, slope, intercepts, maxima, sums, slots, steps, rows_per_request, limit
):
    one = np.float32(1.0)
    for row in range(maxima.shape[0]):
        slot, step = slots[row], steps[row]
        if slot < 0:
            continue
        top = np.float32(-np.inf)
        for m in maxima[row]:
            if m > top:
                top = m
        # The likeliest token contributes exp(0) = 1; what is left is everything else.
        others = -one
        for i in range(maxima.shape[1]):
            others += sums[row, i] * np.exp(maxima[row, i] - top)
        feature = -np.log(others if others > 0.0 else np.float32(0.0))
        feature = min(max(feature, -limit), limit)
        features[slot, step] = feature
        probability = one / (one + np.exp(-(slope[0] * feature + intercepts[step])))
        pred[slot, step] = probability
        conf[row // rows_per_request, step] = probability
