"""CPU twins of rejection sampling: which drafts the target keeps, and what follows them.

Layout, as everywhere in vLLM's sampler: the batch's logits are one flat list of rows. Request
r owns rows ``cu_num_logits[r] : cu_num_logits[r + 1]``; its last row is the bonus row, each
row before it judges the draft token stored one entry further in ``draft_sampled``. A request
that drafted nothing owns its bonus row only.

Symbols: L = logit rows, R = requests of the batch, S = request slots, K = draft length,
V = vocabulary, b = vocabulary blocks. Temperature 0 means greedy: no random number is drawn.

Source: Leviathan et al., arXiv 2211.17192; block verification, Sun et al., arXiv 2403.10444
(``rejection_block.py``).
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from forespark.serving.cpu.drafted import drafted_log_probs
from forespark.serving.cpu.philox import UNIFORM_SCALE, rand32
from forespark.serving.cpu.registry import twin
from forespark.serving.cpu.rejection_block import block_threshold
from forespark.serving.cpu.vocab import (
    as_numpy32,
    best_block,
    block_argmax,
    block_max_sumexp,
    draft_row,
)

_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


@twin(_UTILS, "_compute_local_logits_stats_kernel")
def local_logits_stats(
    grid: tuple[int, ...],  # (L, b)
    target_local_argmax: torch.Tensor,  # [L, b] out, greedy rows
    target_local_argmax_stride: int,
    target_local_max: torch.Tensor,  # [L, b] out
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,  # [L, b] out, sampled rows
    target_local_sumexp_stride: int,
    draft_local_max: torch.Tensor,  # [L, b] out, sampled rows with draft logits
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,  # [L, b] out
    draft_local_sumexp_stride: int,
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    draft_logits: torch.Tensor | None,  # [S, K, V] before temperature
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping: torch.Tensor,  # [L] request slot of each row
    expanded_local_pos: torch.Tensor,  # [L] draft step of each row; >= K: full draft's bonus
    temp: torch.Tensor,  # [S]
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Per vocabulary block: the argmax of greedy rows, log-sum-exp parts of sampled rows."""
    argmax, maxima, sums = (
        x.numpy() for x in (target_local_argmax, target_local_max, target_local_sumexp)
    )
    draft_maxima, draft_sums = draft_local_max.numpy(), draft_local_sumexp.numpy()
    slots = expanded_idx_mapping.numpy()
    steps = expanded_local_pos.numpy()
    temperatures = as_numpy32(temp)
    target = as_numpy32(target_logits)
    for row in np.flatnonzero(steps[: grid[0]] < num_speculative_steps):
        temperature = temperatures[slots[row]]
        logits = target[row, :vocab_size]
        if temperature == 0.0:
            block_argmax(logits, BLOCK_SIZE, maxima[row], argmax[row])
            continue
        block_max_sumexp(logits, np.float32(1.0), BLOCK_SIZE, maxima[row], sums[row])
        if HAS_DRAFT_LOGITS:
            assert draft_logits is not None
            draft = draft_row(draft_logits, slots[row], steps[row], vocab_size)
            block_max_sumexp(draft, temperature, BLOCK_SIZE, draft_maxima[row], draft_sums[row])


@twin(_UTILS, "_rejection_kernel")
def rejection(
    grid: tuple[int, ...],  # (R,)
    sampled: torch.Tensor,  # [R, K + 1] out: accepted drafts, then a greedy correction
    sampled_stride: int,
    rejected_steps: torch.Tensor,  # [R] out: accepted drafts
    target_rejected_logsumexp: torch.Tensor,  # [R] out: of the row that ended verification
    draft_rejected_logsumexp: torch.Tensor,  # [R] out
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    target_local_argmax: torch.Tensor,  # [L, b]
    target_local_argmax_stride: int,
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
    idx_mapping: torch.Tensor,  # [R] request slot
    temp: torch.Tensor,  # [S]
    seed: torch.Tensor,  # [S]
    pos: torch.Tensor,  # [L] position of each row
    synthetic_conditional_rates: torch.Tensor | None,  # [K]
    cumulative_log_p: torch.Tensor | None,  # [L], block verification
    local_residual_mass: torch.Tensor | None,  # [L, b], block verification
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
) -> None:
    """Walk each request's drafts until the target refuses one.

    Greedy: accept while the draft is the target's argmax, and store that argmax where it is
    not. Sampled: accept x with probability min(1, p(x) / q(x)). Synthetic: accept at given
    rates. Block: the longest prefix whose joint threshold holds.
    """
    cu = cu_num_logits.numpy()
    temperatures = as_numpy32(temp)
    drafts = draft_sampled.numpy()
    target_parts = (target_local_max.numpy(), target_local_sumexp.numpy())
    draft_parts = (draft_local_max.numpy(), draft_local_sumexp.numpy())
    slots = idx_mapping.numpy()[: grid[0]]
    log_probs = drafted_log_probs(
        int(cu[grid[0]]),
        target_logits,
        target_parts,
        draft_logits if HAS_DRAFT_LOGITS else None,
        draft_parts,
        drafts,
        cu[: grid[0] + 1],
        slots,
        temperatures,
    )
    thresholds = np.zeros(len(log_probs), np.float32)
    if USE_BLOCK_VERIFICATION:
        assert cumulative_log_p is not None
        thresholds = block_threshold(
            log_probs,
            cumulative_log_p.numpy(),
            local_residual_mass.numpy() if local_residual_mass is not None else None,
            drafts,
            cu[: grid[0] + 1],
            temperatures[slots] == 0.0,
        )
    rates = np.zeros(0, np.float32)
    if SYNTHETIC_MODE:
        assert synthetic_conditional_rates is not None
        rates = synthetic_conditional_rates.numpy()
    _walk(
        sampled.numpy(),
        rejected_steps.numpy(),
        target_rejected_logsumexp.numpy(),
        draft_rejected_logsumexp.numpy(),
        target_local_argmax.numpy(),
        target_parts[0],
        drafts,
        log_probs,
        thresholds,
        cu,
        slots,
        temperatures,
        seed.numpy(),
        pos.numpy(),
        rates,
        USE_BLOCK_VERIFICATION,
    )


@njit(cache=True)
def _walk(
    sampled,
    accepted,
    target_lse,
    draft_lse,
    local_argmax,
    local_max,
    drafts,
    log_probs,
    thresholds,
    cu,
    slots,
    temperatures,
    seeds,
    positions,
    rates,
    block_verification,
):
    for r in range(slots.shape[0]):
        start, drafted = cu[r], cu[r + 1] - cu[r] - 1
        greedy = temperatures[slots[r]] == 0.0
        kept = 0
        target_lse[r] = 0.0
        draft_lse[r] = 0.0
        for step in range(drafted):
            row = start + step
            draft = drafts[row + 1]
            if draft < 0 and not greedy:
                break  # a placeholder ends the draft: the next token comes from the target
            u = UNIFORM_SCALE
            if not greedy or rates.shape[0] > 0:
                u = max(rand32(seeds[slots[r]], positions[row]), UNIFORM_SCALE)
            if greedy:
                best = local_argmax[row, best_block(local_max[row])]
                ok = draft >= 0 and (u < rates[step] if rates.shape[0] > 0 else draft == best)
                sampled[r, step] = draft if ok else best
            else:
                sampled[r, step] = draft
                if block_verification:
                    # No early end: a later prefix may still pass.
                    kept = step + 1 if u <= thresholds[row] else kept
                    continue
                target_lse[r] = log_probs[row, 2]
                draft_lse[r] = log_probs[row, 3]
                if rates.shape[0] > 0:
                    ok = u < rates[step]
                else:
                    ok = log_probs[row, 0] > np.log(u) + log_probs[row, 1]
            if not ok:
                break
            kept += 1
        accepted[r] = kept
        if block_verification and not greedy and kept < drafted:
            target_lse[r] = log_probs[start + kept, 2]
            draft_lse[r] = log_probs[start + kept, 3]


@twin(_SAMPLER, "_flatten_sampled_kernel")
def flatten_sampled(
    grid: tuple[int, ...],  # (R,)
    flat_sampled: torch.Tensor,  # [L] out
    sampled: torch.Tensor,  # [R, K + 1]
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [R]
    cu_num_logits: torch.Tensor,  # [R + 1]
) -> None:
    """Lay each request's sampled tokens over its logit rows, for log-probabilities."""
    flat, tokens, starts = flat_sampled.numpy(), sampled.numpy(), cu_num_logits.tolist()
    for r, count in enumerate(num_sampled.tolist()[: grid[0]]):
        flat[starts[r] : starts[r] + count] = tokens[r, :count]
