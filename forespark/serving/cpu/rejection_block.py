"""CPU twins of block verification, which judges a draft's prefixes jointly.

Where token-wise rejection stops at the first refusal, block verification accepts the longest
prefix i whose draw u_i is at most h_i = m_i / (m_i + 1 - p_i): p_i is the running joint
ratio min(p_{i-1} P(x_i) / Q(x_i), 1), m_i the residual mass sum_x max(p_i P(x) - Q(x), 0) at
the position after it. The last draft has no position after it: h = p.

Source: Sun et al., arXiv 2403.10444. Shapes as in ``rejection.py``.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from forespark.serving.cpu.drafted import drafted_log_probs
from forespark.serving.cpu.registry import twin
from forespark.serving.cpu.simd import exp32
from forespark.serving.cpu.vocab import as_numpy32, draft_row, log_sum_exp, total

_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"


@twin(_UTILS, "_compute_cumulative_log_p_kernel")
def cumulative_log_p(
    grid: tuple[int, ...],  # (R,)
    cumulative_log_p: torch.Tensor,  # [L] out: log p_i at the row of draft i
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    target_local_max: torch.Tensor,  # [L, b]
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,  # [L, b]
    target_local_sumexp_stride: int,
    draft_sampled: torch.Tensor,  # [L]
    draft_logits: torch.Tensor | None,  # [S, K, V]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: torch.Tensor,  # [L, b]
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,  # [L, b]
    draft_local_sumexp_stride: int,
    cu_num_logits: torch.Tensor,  # [R + 1]
    idx_mapping: torch.Tensor,  # [R]
    temp: torch.Tensor,  # [S]
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Running joint ratio of each sampled request's draft; greedy requests are left out."""
    cu = cu_num_logits.numpy()[: grid[0] + 1]
    slots, temperatures = idx_mapping.numpy()[: grid[0]], as_numpy32(temp)
    log_probs = drafted_log_probs(
        int(cu[-1]),
        target_logits,
        (target_local_max.numpy(), target_local_sumexp.numpy()),
        draft_logits if HAS_DRAFT_LOGITS else None,
        (draft_local_max.numpy(), draft_local_sumexp.numpy()),
        draft_sampled.numpy(),
        cu,
        slots,
        temperatures,
    )
    greedy = temperatures[slots] == 0.0
    _accumulate(cumulative_log_p.numpy(), log_probs, draft_sampled.numpy(), cu, greedy)


@njit(cache=True)
def _accumulate(out, log_probs, drafts, cu, greedy):
    for r in range(greedy.shape[0]):
        if greedy[r]:
            continue
        log_p = np.float32(0.0)
        for row in range(cu[r], cu[r + 1] - 1):
            if drafts[row + 1] >= 0:  # a placeholder carries the last value on
                log_p = min(log_p + (log_probs[row, 0] - log_probs[row, 1]), np.float32(0.0))
            out[row] = log_p


@twin(_UTILS, "_compute_local_residual_mass_kernel")
def local_residual_mass(
    grid: tuple[int, ...],  # (L, b)
    local_residual_mass: torch.Tensor,  # [L, b] out
    local_residual_mass_stride: int,
    cumulative_log_p: torch.Tensor,  # [L]
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    target_local_max: torch.Tensor,  # [L, b]
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,  # [L, b]
    target_local_sumexp_stride: int,
    draft_logits: torch.Tensor,  # [S, K, V]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: torch.Tensor,  # [L, b]
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,  # [L, b]
    draft_local_sumexp_stride: int,
    draft_sampled: torch.Tensor,  # [L]
    expanded_idx_mapping: torch.Tensor,  # [L]
    expanded_local_pos: torch.Tensor,  # [L]
    temp: torch.Tensor,  # [S]
    vocab_size: int,
    num_speculative_steps: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
) -> None:
    """Per block, sum max(p P(x) - Q(x), 0), with p the joint ratio before the row."""
    steps, slots = expanded_local_pos.numpy(), expanded_idx_mapping.numpy()
    drafts, temperatures = draft_sampled.numpy(), as_numpy32(temp)
    target = as_numpy32(target_logits)
    maxima, sums = target_local_max.numpy(), target_local_sumexp.numpy()
    draft_maxima, draft_sums = draft_local_max.numpy(), draft_local_sumexp.numpy()
    # The first row has nothing before it; the last of the batch is a bonus row.
    for row in range(1, grid[0] - 1):
        slot, step = slots[row], steps[row]
        used = 0 < step < num_speculative_steps and drafts[row + 1] >= 0
        if not used or temperatures[slot] == 0.0:
            continue
        _row_mass(
            target[row, :vocab_size],
            draft_row(draft_logits, slot, step, vocab_size),
            temperatures[slot],
            log_sum_exp(maxima[row], sums[row]),
            log_sum_exp(draft_maxima[row], draft_sums[row]),
            np.float32(np.exp(cumulative_log_p.numpy()[row - 1])),
            BLOCK_SIZE,
            local_residual_mass.numpy()[row],
        )


@njit(cache=True)
def _row_mass(target, draft, temperature, target_lse, draft_lse, ratio, block, out):
    mass = np.empty(block, np.float32)
    for index in range(out.shape[0]):
        start = index * block
        width = min(block, target.shape[0] - start)
        for i in range(width):
            p = ratio * exp32(target[start + i] - target_lse)
            q = exp32(draft[start + i] / temperature - draft_lse)
            mass[i] = p - q if p > q else np.float32(0.0)
        out[index] = total(mass[:width])


@njit(cache=True)
def _thresholds(log_probs, log_ratio, residual_mass, drafts, cu, greedy, out):
    for r in range(greedy.shape[0]):
        if greedy[r]:
            continue
        for row in range(cu[r], cu[r + 1] - 1):
            ratio = np.exp(log_ratio[row])
            out[row] = ratio
            if row + 2 < cu[r + 1] and drafts[row + 2] >= 0:
                if residual_mass.shape[0] > 0:
                    mass = total(residual_mass[row + 1])
                else:  # a drafter that is certain of its token: all of p but that token
                    mass = ratio * (np.float32(1.0) - np.exp(log_probs[row + 1, 0]))
                denominator = mass + np.float32(1.0) - ratio
                out[row] = mass / denominator if denominator > 0.0 else np.float32(1.0)


def block_threshold(
    log_probs: np.ndarray,  # [L, 4] from ``drafted_log_probs``
    log_ratio: np.ndarray,  # [L] log p_i
    residual_mass: np.ndarray | None,  # [L, b], None for a drafter without logits
    drafts: np.ndarray,  # [L]
    cu_num_logits: np.ndarray,  # [R + 1]
    greedy: np.ndarray,  # [R] bool
) -> np.ndarray:
    """h_i of every judged row, [L] float32; 0 where nothing is judged."""
    out = np.zeros(len(log_probs), np.float32)
    mass = np.zeros((0, 0), np.float32) if residual_mass is None else residual_mass
    _thresholds(log_probs, log_ratio, mass, drafts, cu_num_logits, greedy, out)
    return out
