"""CPU twins of autoregressive drafting (EAGLE-3, MTP): one draft token per forward pass.

The first pass runs over the target's tokens, shifted left by one so that each hidden state
meets the token after it; every later pass takes one token per request. The refused tail of a
request stays in the batch but is never read.

Symbols: R = requests of the batch, S = request slots, T = target tokens, K = draft length,
H = hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from forespark.serving.cpu.registry import twin

_AUTOREGRESSIVE = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator"


@twin(_AUTOREGRESSIVE, "_prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(
    grid: tuple[int, ...],  # (R,)
    last_token_indices: torch.Tensor,  # [max_num_reqs] out: row that predicts the first draft
    draft_current_step: torch.Tensor,  # [] or [1] out: 0
    draft_input_ids: torch.Tensor,  # [>= T] out
    draft_positions: torch.Tensor,  # [>= T] out
    draft_query_start_loc: torch.Tensor,  # [max_num_reqs + 1] out
    draft_seq_lens: torch.Tensor,  # [max_num_reqs] out
    target_input_ids: torch.Tensor,  # [T]
    target_positions: torch.Tensor,  # [T]
    idx_mapping: torch.Tensor,  # [R]
    last_sampled: torch.Tensor,  # [S] or [S, 1]
    next_prefill_tokens: torch.Tensor,  # [S]
    num_sampled: torch.Tensor,  # [R] 0: the request is still prefilling
    num_rejected: torch.Tensor,  # [R]
    query_start_loc: torch.Tensor,  # [R + 1]
    seq_lens: torch.Tensor,  # [R]
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Shift the target's tokens by one and end each request with its newest token."""
    num_reqs = grid[0]
    starts = query_start_loc.numpy()[: num_reqs + 1]
    slots = idx_mapping.numpy()[:num_reqs]
    ends = starts[1:] - num_rejected.numpy()[:num_reqs]
    newest = np.where(
        num_sampled.numpy()[:num_reqs] > 0,
        last_sampled.numpy().reshape(-1)[slots],
        next_prefill_tokens.numpy().reshape(-1)[slots],
    )
    input_ids, positions = draft_input_ids.numpy(), draft_positions.numpy()
    for start, end in zip(starts[:-1], ends, strict=True):
        input_ids[start : end - 1] = target_input_ids.numpy()[start + 1 : end]
        positions[start:end] = target_positions.numpy()[start:end]
    input_ids[ends - 1] = newest
    draft_current_step.zero_()
    _fill(last_token_indices.numpy(), ends - 1, max_num_reqs, 0)
    _fill(draft_seq_lens.numpy(), seq_lens.numpy()[:num_reqs], max_num_reqs, 0)
    _fill(draft_query_start_loc.numpy(), starts[:-1], max_num_reqs + 1, starts[-1])


def _fill(out: np.ndarray, values: np.ndarray, size: int, padding: int) -> None:
    out[: len(values)] = values
    out[len(values) : size] = padding


@twin(_AUTOREGRESSIVE, "_prepare_decode_inputs_kernel")
def prepare_decode_inputs(
    grid: tuple[int, ...],  # (R + 1,)
    draft_tokens: torch.Tensor,  # [R, K] or [R]: the first drafted token of each request
    draft_tokens_stride: int,
    target_seq_lens: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
    input_ids: torch.Tensor,  # [>= R] out
    positions: torch.Tensor,  # [>= R] in place
    sample_src_positions: torch.Tensor,  # [>= R] in place: position keys of the draws
    query_start_loc: torch.Tensor,  # [max_num_reqs + 1] out
    seq_lens: torch.Tensor,  # [max_num_reqs] out
    max_model_len: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Inputs of the second drafting pass: one query per request behind its accepted tokens."""
    num_reqs = grid[0] - 1
    first = draft_tokens.numpy()
    input_ids.numpy()[:num_reqs] = first[:, 0] if first.ndim == 2 else first
    sample_src_positions.numpy()[:num_reqs] += 1
    lengths = target_seq_lens.numpy()[:num_reqs] - num_rejected.numpy()[:num_reqs]
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions.numpy()[:num_reqs], max_model_len - 1)
        _advance(lengths, max_model_len)
    _fill(seq_lens.numpy(), lengths, max_num_reqs, 0)
    _fill(query_start_loc.numpy(), np.arange(num_reqs), max_num_reqs + 1, num_reqs)


def _advance(x: np.ndarray, limit: int) -> None:
    np.minimum(x + 1, limit, out=x)


@twin(_AUTOREGRESSIVE, "_update_draft_inputs_kernel")
def update_draft_inputs(
    grid: tuple[int, ...],  # (R,)
    output_draft_tokens: torch.Tensor,  # [>= R, K] out at the current step
    output_draft_tokens_stride: int,
    next_input_hidden_states: torch.Tensor,  # [>= R, H] out
    next_input_hidden_states_stride: int,
    input_ids: torch.Tensor,  # [>= R] out
    positions: torch.Tensor,  # [>= R] in place
    sample_src_positions: torch.Tensor,  # [>= R] in place
    seq_lens: torch.Tensor,  # [>= R] in place
    draft_tokens: torch.Tensor,  # [R] just drafted
    current_draft_step: torch.Tensor,  # [] or [1]
    hidden_states: torch.Tensor,  # [>= R, H]
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Store the drafted tokens and, unless they were the last, set up the next pass."""
    num_reqs = grid[0]
    step = int(current_draft_step)
    output_draft_tokens[:num_reqs, step] = draft_tokens[:num_reqs]
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions.numpy()[:num_reqs] += 1
    input_ids[:num_reqs] = draft_tokens[:num_reqs]
    next_input_hidden_states[:num_reqs, :hidden_size] = hidden_states[:num_reqs, :hidden_size]
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions.numpy()[:num_reqs], max_model_len - 1)
        _advance(seq_lens.numpy()[:num_reqs], max_model_len)
