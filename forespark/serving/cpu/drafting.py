"""CPU twins of parallel drafting: the block's inputs and the DFlash 2 selector's walk.

A parallel drafter (DFlash, DFlash 2, DSpark) drafts a block of tokens per request in one
forward pass. Its context is the target's hidden states, one per target token, less the
refused tail; its queries are the anchor (the last sampled token) and the masks behind it.

Symbols: R = requests of the batch, S = request slots, T = target tokens, K = draft length,
Q = queries per request (K + 1, or K where the anchor itself predicts), C = candidates.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from forespark.serving.cpu.philox import gumbel32, gumbel64, gumbel_key
from forespark.serving.cpu.registry import twin
from forespark.serving.cpu.vocab import as_numpy32

_DFLASH = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"
_DFLASH2 = "vllm.v1.worker.gpu.spec_decode.dflash2.speculator"


@twin(_DFLASH, "_prepare_dflash_inputs_kernel")
def prepare_dflash_inputs(
    grid: tuple[int, ...],  # (R, blocks)
    out_input_ids: torch.Tensor,  # [>= R * Q] anchor and masks
    out_query_positions: torch.Tensor,  # [>= R * Q]
    out_query_start_loc: torch.Tensor,  # [max_num_reqs + 1]
    out_seq_lens: torch.Tensor,  # [max_num_reqs] context and queries
    out_query_slot_mapping: torch.Tensor,  # [max_num_tokens] cache slots of the queries
    out_context_positions: torch.Tensor,  # [>= T]
    out_context_slot_mapping: torch.Tensor,  # [>= T] cache slots of the context
    out_sample_indices: torch.Tensor,  # [max_num_reqs * K] query rows that predict
    out_sample_pos: torch.Tensor,  # [max_num_reqs * K] positions they predict
    out_sample_idx_mapping: torch.Tensor,  # [max_num_reqs * K] request slot, -1 = padding
    out_temperature: torch.Tensor,  # [S]
    out_seeds: torch.Tensor,  # [S]
    target_positions: torch.Tensor,  # [T]
    target_query_start_loc: torch.Tensor,  # [R + 1]
    idx_mapping: torch.Tensor,  # [R]
    last_sampled: torch.Tensor,  # [S] or [S, 1]
    next_prefill_tokens: torch.Tensor,  # [S]
    num_sampled: torch.Tensor,  # [R] 0: the request is still prefilling
    num_rejected: torch.Tensor,  # [R]
    temperature: torch.Tensor,  # [S]
    seeds: torch.Tensor,  # [S]
    block_table: torch.Tensor,  # [>= R, blocks per request]
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions, cache slots and sampling rows of every request's context and draft block.

    Refused context rows get position 0 and the padding slot, so they write no K/V; so does
    any row whose block is the null block 0. Everything past the batch is padded.
    """
    num_reqs = grid[0]
    table = block_table.as_strided((num_reqs, block_table_stride), (block_table_stride, 1))
    starts = target_query_start_loc.numpy()
    slots = idx_mapping.numpy()
    sampled = num_sampled.numpy()[:num_reqs]
    # What the block starts from: the sampled token or, mid-prompt, the prompt's next one.
    anchors = np.where(
        sampled > 0,
        last_sampled.numpy().reshape(-1)[slots[:num_reqs]],
        next_prefill_tokens.numpy().reshape(-1)[slots[:num_reqs]],
    )
    valid_ends = starts[1 : num_reqs + 1] - num_rejected.numpy()[:num_reqs]
    layout = (block_size, cp_rank, CP_SIZE, CP_INTERLEAVE, PAD_SLOT_ID)
    _fill_context(
        out_context_positions.numpy(),
        out_context_slot_mapping.numpy(),
        target_positions.numpy(),
        starts,
        valid_ends,
        table.numpy(),
        layout,
    )
    _fill_queries(
        out_input_ids.numpy(),
        out_query_positions.numpy(),
        out_query_slot_mapping.numpy(),
        out_seq_lens.numpy(),
        target_positions.numpy()[valid_ends - 1] + 1,
        anchors,
        table.numpy(),
        layout,
        parallel_drafting_token_id,
        num_query_per_req,
        max_model_len,
    )
    first = 0 if SAMPLE_FROM_ANCHOR else 1  # query that predicts the first draft token
    _fill_sampling(
        out_sample_indices.numpy(),
        out_sample_pos.numpy(),
        out_sample_idx_mapping.numpy(),
        target_positions.numpy()[valid_ends - 1] + 1,
        slots,
        num_query_per_req,
        num_speculative_steps,
        first,
    )
    used = slots[:num_reqs]
    out_temperature.numpy()[used] = temperature.numpy()[used]
    out_seeds.numpy()[used] = seeds.numpy()[used]

    # Padding, which a captured graph would read: no query, no sample, no cache write.
    queries = num_reqs * num_query_per_req
    query_starts = out_query_start_loc.numpy()
    query_starts[:num_reqs] = np.arange(0, queries, num_query_per_req)
    query_starts[num_reqs : max_num_reqs + 1] = queries
    out_seq_lens.numpy()[num_reqs:max_num_reqs] = 0
    out_query_slot_mapping.numpy()[queries:max_num_tokens] = PAD_SLOT_ID
    padding = slice(num_reqs * num_speculative_steps, max_num_reqs * num_speculative_steps)
    out_sample_indices.numpy()[padding] = 0
    out_sample_pos.numpy()[padding] = 0
    out_sample_idx_mapping.numpy()[padding] = -1


@njit(cache=True)
def _cache_slot(position, blocks, layout):
    """Cache slot of a position; padding where its block is null or on another rank."""
    block_size, rank, ranks, interleave, pad = layout
    span = block_size * ranks
    block = np.int64(blocks[min(position // span, blocks.shape[0] - 1)])
    if block == 0:
        return pad
    offset = position % span
    if ranks == 1:
        return block * block_size + offset
    if offset // interleave % ranks != rank:
        return pad
    local = offset // (interleave * ranks) * interleave + offset % interleave
    return block * block_size + local


@njit(cache=True)
def _fill_context(positions, cache_slots, target_positions, starts, valid_ends, table, layout):
    for r in range(valid_ends.shape[0]):
        for i in range(starts[r], starts[r + 1]):
            valid = i < valid_ends[r]
            positions[i] = target_positions[i] if valid else 0
            cache_slots[i] = _cache_slot(positions[i], table[r], layout) if valid else layout[4]


@njit(cache=True)
def _fill_queries(
    input_ids,
    positions,
    cache_slots,
    seq_lens,
    anchor_positions,
    anchors,
    table,
    layout,
    mask_token,
    queries,
    max_model_len,
):
    for r in range(anchors.shape[0]):
        for q in range(queries):
            row, position = r * queries + q, anchor_positions[r] + q
            input_ids[row] = anchors[r] if q == 0 else mask_token
            positions[row] = min(position, max_model_len - 1)
            cache_slots[row] = _cache_slot(position, table[r], layout)
        seq_lens[r] = min(anchor_positions[r] + queries, max_model_len)


@njit(cache=True)
def _fill_sampling(indices, positions, owners, anchor_positions, slots, queries, steps, first):
    for r in range(anchor_positions.shape[0]):
        for q in range(first, queries):
            sample = r * steps + q - first
            indices[sample] = r * queries + q
            # A mask predicts its own position, a predicting anchor the next one.
            positions[sample] = anchor_positions[r] + q + (1 - first)
            owners[sample] = slots[r]


@twin(_DFLASH2, "_selector_walk_kernel")
def selector_walk(
    grid: tuple[int, ...],  # (R,)
    scores: torch.Tensor,  # [R, K, C, C] of candidate (last) after predecessor candidate
    candidates: torch.Tensor,  # [R, K, C] token ids
    sample_pos: torch.Tensor,  # [>= R * K] predicted positions
    req_state: torch.Tensor,  # [>= R * K] request slot, -1 = padding
    temperature: torch.Tensor,  # [S]
    seeds: torch.Tensor,  # [S]
    tokens: torch.Tensor,  # [>= R, K] out: drafted tokens
    realized_scores: torch.Tensor,  # [>= R, K, C] out: scores after the path's predecessors
    num_steps: int,
    top_k: int,
    BLOCK_K: int,
    SAMPLE_PROBABILISTIC: bool,
    USE_FP64: bool,
) -> None:
    """Walk each request's block left to right, choosing a candidate given the one before.

    The first step reads predecessor row 0, which the selector fills for the anchor. Greedy,
    or with Gumbel noise keyed by token and position: a draw from softmax(scores / T).
    """
    _walk(
        grid[0],
        as_numpy32(scores.view(-1, num_steps, top_k, top_k)),
        candidates.view(-1, num_steps, top_k).numpy(),
        sample_pos.numpy(),
        req_state.numpy(),
        temperature.numpy(),
        seeds.numpy(),
        tokens.view(-1, num_steps).numpy(),
        realized_scores.view(-1, num_steps, top_k).numpy(),
        SAMPLE_PROBABILISTIC,
        USE_FP64,
    )


@njit(cache=True)
def _walk(
    num_reqs,
    scores,
    candidates,
    positions,
    states,
    temperatures,
    seeds,
    tokens,
    realized,
    probabilistic,
    fp64,
):
    steps = tokens.shape[1]
    for r in range(num_reqs):
        state = states[r * steps]
        if state < 0:
            continue
        temperature = np.float32(temperatures[state]) if probabilistic else np.float32(0.0)
        previous = 0
        for step in range(steps):
            row = scores[r, step, previous]
            position = positions[r * steps + step] - 1
            realized[r, step] = row
            previous = _choose(row, candidates[r, step], seeds[state], position, temperature, fp64)
            tokens[r, step] = candidates[r, step, previous]


@njit(cache=True)
def _choose(scores, candidates, seed, position, temperature, fp64):
    """Index of the best (noisy) score; the first of equals, NaN never wins."""
    key = gumbel_key(seed, position, True) if temperature != 0.0 else 0
    best, top = 0, -np.inf
    for i in range(scores.shape[0]):
        value = np.float64(scores[i])
        if temperature != 0.0 and fp64:
            value = value / np.float64(temperature) + gumbel64(key, candidates[i])
        elif temperature != 0.0:
            noisy = np.float32(scores[i]) / temperature + gumbel32(key, candidates[i])
            value = np.float64(np.float32(noisy))
        if value > top:
            top, best = value, i
    return best


@twin(_DFLASH2, "_cache_draft_logits_kernel")
def cache_draft_logits(
    grid: tuple[int, ...],  # (R * K,)
    draft_logits: torch.Tensor,  # [S, K, V] in place; -inf but at the cached candidates
    cached_candidates: torch.Tensor,  # [S, K, C] in place
    candidates: torch.Tensor,  # [R, K, C]
    scores: torch.Tensor,  # [>= R, K, C] realized scores
    req_state: torch.Tensor,  # [>= R * K] request slot, -1 = padding
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    num_steps: int,
    top_k: int,
    BLOCK_K: int,
) -> None:
    """Swap a slot's cached candidate scores for this step's, touching C columns only."""
    _cache(
        grid[0],
        draft_logits.numpy(),
        cached_candidates.view(-1, num_steps, top_k).numpy(),
        candidates.view(-1, top_k).numpy(),
        scores.view(-1, top_k).numpy(),
        req_state.numpy(),
    )


@njit(cache=True)
def _cache(num_samples, draft_logits, cached, candidates, scores, states):
    steps = cached.shape[1]
    for flat in range(num_samples):
        state, step = states[flat], flat % steps
        if state < 0:
            continue
        for i in range(cached.shape[2]):
            draft_logits[state, step, cached[state, step, i]] = -np.inf
        for i in range(cached.shape[2]):
            draft_logits[state, step, candidates[flat, i]] = scores[flat, i]
            cached[state, step, i] = candidates[flat, i]
