"""CPU twins that draw the token after the accepted drafts and append it.

Layout and symbols as in ``rejection.py``.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from forespark.serving.cpu.philox import add_gumbel, add_gumbel64, gumbel_key
from forespark.serving.cpu.registry import twin
from forespark.serving.cpu.simd import exp32, log1p32
from forespark.serving.cpu.vocab import (
    CHUNK,
    as_numpy32,
    best_block,
    block_argmax,
    draft_row,
    some_above,
)

_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"


@twin(_UTILS, "_resample_kernel")
def resample(
    grid: tuple[int, ...],  # (R, b)
    resampled_local_argmax: torch.Tensor,  # [R, b] out: token id of each block's winner
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,  # [R, b] out: its noisy logit
    resampled_local_max_stride: int,
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    target_rejected_logsumexp: torch.Tensor,  # [R]
    draft_logits: torch.Tensor | None,  # [S, K, V]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp: torch.Tensor,  # [R]
    rejected_step: torch.Tensor,  # [R] accepted drafts, so the step to sample at
    cu_num_logits: torch.Tensor,  # [R + 1]
    expanded_idx_mapping: torch.Tensor,  # [L]
    draft_sampled: torch.Tensor,  # [L]
    temp: torch.Tensor,  # [S]
    seed: torch.Tensor,  # [S]
    pos: torch.Tensor,  # [L]
    cumulative_log_p: torch.Tensor | None,  # [L], block verification
    contexts: torch.Tensor | None,
    contexts_stride: int,
    watermarking: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
) -> None:
    """Draw the token after the accepted drafts, as each block's best noisy logit.

    The bonus token comes from the target's distribution p, a refused draft's replacement
    from the residual max(p - q, 0). A greedy request needs a draw only for its bonus.

    Raises:
        ValueError: the request is watermarked, which the CPU path does not do.
    """
    if WATERMARK:
        raise ValueError("watermarked sampling has no CPU twin; serve without a watermark")
    values, tokens = resampled_local_max.numpy(), resampled_local_argmax.numpy()
    cu, steps, drafts = cu_num_logits.numpy(), rejected_step.numpy(), draft_sampled.numpy()
    slots, temperatures = expanded_idx_mapping.numpy(), as_numpy32(temp)
    target = as_numpy32(target_logits)
    noisy = np.empty(vocab_size, np.float64 if USE_FP64 else np.float32)
    for r in range(grid[0]):
        row = cu[r] + steps[r]
        slot = slots[row]
        bonus = row == cu[r + 1] - 1
        logits = target[row, :vocab_size]
        if temperatures[slot] == 0.0:
            if bonus:
                block_argmax(logits, BLOCK_SIZE, values[r], tokens[r])
            continue
        if not bonus and drafts[row + 1] >= 0:
            if HAS_DRAFT_LOGITS:
                assert draft_logits is not None
                draft = draft_row(draft_logits, slot, steps[r], vocab_size)
                log_p_prefix = np.float32(0.0)
                if USE_BLOCK_VERIFICATION and steps[r] > 0:
                    assert cumulative_log_p is not None
                    log_p_prefix = cumulative_log_p.numpy()[row - 1]
                residual = np.empty(vocab_size, np.float32)
                _residual_logits(
                    logits,
                    draft,
                    temperatures[slot],
                    target_rejected_logsumexp.numpy()[r],
                    draft_rejected_logsumexp.numpy()[r],
                    log_p_prefix,
                    residual,
                )
                logits = residual
            else:  # the drafter was certain of this token: p without it
                logits = logits.copy()
                logits[drafts[row + 1]] = -np.inf
        key = gumbel_key(seed.numpy()[slot], pos.numpy()[row], False)
        (add_gumbel64 if USE_FP64 else add_gumbel)(key, logits, 0, 1.0, noisy)
        block_argmax(noisy, BLOCK_SIZE, values[r], tokens[r])


@njit(cache=True)
def _residual_logits(target, draft, temperature, target_lse, draft_lse, log_p_prefix, out):
    """log max(p - q, 0) = log p + log1p(-q / p), without subtracting probabilities."""
    for start in range(0, target.shape[0], CHUNK):
        end = min(start + CHUNK, target.shape[0])
        log_p, p, q = out[start:end], target[start:end], draft[start:end]
        for i in range(log_p.shape[0]):
            log_p[i] = p[i] - target_lse + log_p_prefix
        if some_above(q, np.float32(-np.inf)):  # else q = 0 in this chunk
            for i in range(log_p.shape[0]):
                ratio = exp32(q[i] / temperature - draft_lse - log_p[i])
                below = ratio < np.float32(1.0)  # False for NaN too
                log_rest = log_p[i] + log1p32(-ratio if below else np.float32(0.0))
                log_p[i] = log_rest if below else np.float32(-np.inf)


@twin(_UTILS, "_insert_resampled_kernel")
def insert_resampled(
    grid: tuple[int, ...],  # (R,)
    sampled: torch.Tensor,  # [R, K + 1] in place
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [R] in place: accepted drafts, leaves counting one more
    resampled_local_argmax: torch.Tensor,  # [R, b]
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,  # [R, b]
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits: torch.Tensor,  # [R + 1]
    expanded_idx_mapping: torch.Tensor,  # [L]
    temp: torch.Tensor,  # [S]
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Append each request's drawn token to its accepted drafts."""
    _insert(
        grid[0],
        sampled.numpy(),
        num_sampled.numpy(),
        resampled_local_argmax.numpy(),
        resampled_local_max.numpy(),
        cu_num_logits.numpy(),
        expanded_idx_mapping.numpy(),
        as_numpy32(temp),
    )


@njit(cache=True)
def _insert(num_reqs, sampled, num_sampled, tokens, values, cu, slots, temperatures):
    for r in range(num_reqs):
        step = num_sampled[r]
        row = cu[r] + step
        num_sampled[r] = step + 1
        # A greedy request that refused a draft has the target's argmax in place already.
        if temperatures[slots[row]] != 0.0 or row == cu[r + 1] - 1:
            sampled[r, step] = tokens[r, best_block(values[r])]
