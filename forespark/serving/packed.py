"""Packed layout of variable-length draft blocks.

Stock DFlash gives every request a block of ``K + 1`` query tokens. Here request i gets
``d_i + 1`` tokens (anchor, then ``d_i`` masks), or none at all when ``d_i`` is 0, and the
blocks lie back to back in one flat batch, so the drafter pays for ``sum(d_i + 1)`` tokens
over the drafted requests (paper, Section 4.4).

Shapes: R = requests of the batch in batch order, T = packed drafter tokens,
M = ``sum(d_i)`` draft positions, C = tokens of the target's batch.
Everything is plain tensor code without a host-device synchronisation: sizes that decide
shapes (T, M) are passed in by the host, which planned them. Where lengths stay on the
device the host knows only a bound of T; what is past the blocks is padding (see
``prepare_queries``). On a GPU one kernel does the work (``kernels/queries.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

PAD_SLOT_ID = -1  # vLLM's slot for "write nothing"


@dataclass
class Blocks:
    """Where every packed token and every draft position comes from.

    Attributes:
        start: [R + 1] int32, first packed token of each request (query_start_loc).
        request: [T] int64, request of each packed token.
        offset: [T] int64, 0 at the anchor, 1..d_i at the masks.
        draft_request: [M] int64, request of each draft position.
        draft_step: [M] int64, 0-based step of each draft position in its draft.
        draft_token: [M] int64, packed token that predicts the position.
    """

    start: torch.Tensor
    request: torch.Tensor
    offset: torch.Tensor
    draft_request: torch.Tensor
    draft_step: torch.Tensor
    draft_token: torch.Tensor


def lay_out(lengths: torch.Tensor, num_tokens: int, num_drafts: int) -> Blocks:
    """Lay the blocks of ``lengths`` back to back, without padding.

    Args:
        lengths: [R] draft length d_i of each request, 0 for "not drafted".
        num_tokens: T, equal to the sum of d_i + 1 over requests with d_i >= 1.
        num_drafts: M, equal to ``lengths.sum()``.
    """
    device = lengths.device
    lengths = lengths.to(torch.int64)
    width = torch.where(lengths > 0, lengths + 1, 0)
    start = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=device)
    torch.cumsum(width, 0, out=start[1:])
    rows = torch.arange(lengths.shape[0], device=device)
    request = torch.repeat_interleave(rows, width, output_size=num_tokens)
    offset = torch.arange(num_tokens, device=device) - start[request]
    draft_request = torch.repeat_interleave(rows, lengths, output_size=num_drafts)
    first_draft = torch.cumsum(lengths, 0) - lengths
    draft_step = torch.arange(num_drafts, device=device) - first_draft[draft_request]
    return Blocks(
        start=start.to(torch.int32),
        request=request,
        offset=offset,
        draft_request=draft_request,
        draft_step=draft_step,
        draft_token=start[draft_request] + 1 + draft_step,
    )


@dataclass
class QueryBuffers:
    """What the drafter's forward pass reads: persistent tensors, so that graphs may replay.

    Attributes:
        input_ids: [max_tokens].
        positions: [max_tokens].
        query_start_loc: [max_requests + 1] int32.
        seq_lens: [max_requests] int32.
        offsets: [max_tokens] int64, place of each token in its block.
        mask_token: id of the token to be predicted.
        max_model_len: positions from here on do not exist.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    offsets: torch.Tensor
    mask_token: int
    max_model_len: int


@dataclass
class CacheGroup:
    """One K/V cache group of the drafter.

    Attributes:
        table: [R, max_blocks] block table of the batch.
        block_size: tokens per block.
        slots: [max_tokens] int64, slot of each packed token (to be filled).
    """

    table: torch.Tensor
    block_size: int
    slots: torch.Tensor


@dataclass
class Anchors:
    """What the target's last pass left behind for each request.

    Attributes:
        row: [R] int64, batch row of the last accepted token: the newest position whose
            target hidden state exists (anchor position - 1).
        position: [R] int64, position of that token.
        token: [R] int64, the anchor: the token sampled after it, or the next prompt token
            of a request that is still prefilling.
    """

    row: torch.Tensor
    position: torch.Tensor
    token: torch.Tensor


def find_anchors(
    query_start_loc: torch.Tensor,  # [R + 1] of the target's batch
    positions: torch.Tensor,  # [C]
    idx_mapping: torch.Tensor,  # [R] request-state slot of each request
    num_sampled: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
    last_sampled: torch.Tensor,  # [slots] or [slots, 1]
    next_prefill: torch.Tensor,  # [slots] or [lookahead, slots]
) -> Anchors:
    """Locate each request's last accepted token and its anchor."""
    row = (query_start_loc[1:] - num_rejected - 1).to(torch.int64)
    slots = idx_mapping.to(torch.int64)
    sampled = last_sampled.reshape(last_sampled.shape[0], -1)[slots, 0].to(torch.int64)
    prompt = next_prefill.reshape(-1, last_sampled.shape[0])[0, slots].to(torch.int64)
    token = torch.where(num_sampled > 0, sampled, prompt)
    return Anchors(row=row, position=positions[row].to(torch.int64), token=token)


def slots_of(
    positions: torch.Tensor,  # [n] int64
    request: torch.Tensor,  # [n] row of ``block_table``
    block_table: torch.Tensor,  # [R, max_blocks]
    block_size: int,
    valid: torch.Tensor,  # [n] bool
) -> torch.Tensor:
    """Cache slots of positions; PAD where invalid, past the table or in the null block."""
    column = positions // block_size
    inside = valid & (column < block_table.shape[1])
    column = column.clamp(max=block_table.shape[1] - 1)
    block = block_table[request, column].to(torch.int64)
    slot = block * block_size + positions % block_size
    return torch.where(inside & (block != 0), slot, PAD_SLOT_ID)


def prepare_queries(
    lengths: torch.Tensor,  # [R]
    anchors: Anchors,
    num_tokens: int,
    num_drafts: int,
    K: int,
    buffers: QueryBuffers,
    groups: list[CacheGroup],
) -> Blocks:
    """Fill the drafter's inputs for blocks of ``lengths`` and say where drafts are read.

    Entries up to ``num_tokens`` that belong to no block are padding. They are masks at
    position 0 of a block of their own, write no cache slot, belong to no request's query
    (``query_start_loc`` ends before them) and no draft reads them. Draft entries past the
    sum of lengths read token 0, and nothing of them may be kept.

    Args:
        num_tokens: T or more: the token bucket. Blocks that do not fit are cut.
        num_drafts: M or more.
        K: the largest length.

    Returns:
        Blocks with [num_tokens] token and [num_drafts] draft entries.
    """
    if lengths.is_cuda:
        from forespark.serving.kernels.queries import prepare_queries_kernel

        return prepare_queries_kernel(lengths, anchors, num_tokens, num_drafts, K, buffers, groups)
    R = lengths.shape[0]
    drafted = int(lengths.sum())
    used = drafted + int((lengths > 0).sum())
    assert used <= num_tokens and drafted <= num_drafts
    blocks = lay_out(lengths, used, drafted)
    is_anchor = blocks.offset == 0
    buffers.input_ids[:used] = torch.where(
        is_anchor, anchors.token[blocks.request], buffers.mask_token
    ).to(buffers.input_ids.dtype)
    positions = anchors.position[blocks.request] + 1 + blocks.offset
    buffers.positions[:used] = positions.clamp(max=buffers.max_model_len - 1)
    buffers.query_start_loc[: R + 1] = blocks.start
    buffers.query_start_loc[R + 1 :].fill_(used)
    ends = anchors.position + 2 + lengths
    buffers.seq_lens[:R] = ends.clamp(max=buffers.max_model_len).to(torch.int32)
    buffers.seq_lens[R:].zero_()
    buffers.offsets[:used] = blocks.offset
    buffers.offsets[used:].zero_()
    for group in groups:
        group.slots[:used] = slots_of(
            positions, blocks.request, group.table, group.block_size,
            positions < buffers.max_model_len,
        )  # fmt: skip
    if used < num_tokens or drafted < num_drafts:
        _pad(blocks, used, num_tokens, num_drafts, buffers, groups)
    return blocks


def _pad(
    blocks: Blocks,
    used: int,
    num_tokens: int,
    num_drafts: int,
    buffers: QueryBuffers,
    groups: list[CacheGroup],
) -> None:
    """Make everything from ``used`` to ``num_tokens`` inert; extend ``blocks`` with zeros."""
    buffers.input_ids[used:num_tokens] = buffers.mask_token
    buffers.positions[used:num_tokens] = 0
    for group in groups:
        group.slots[used:num_tokens] = PAD_SLOT_ID
    for name, size in (
        ("request", num_tokens), ("offset", num_tokens), ("draft_request", num_drafts),
        ("draft_step", num_drafts), ("draft_token", num_drafts),
    ):  # fmt: skip
        entries = getattr(blocks, name)
        setattr(blocks, name, F.pad(entries, (0, size - entries.shape[0])))


def context_slots(
    query_start_loc: torch.Tensor,  # [R + 1]
    positions: torch.Tensor,  # [C]
    num_rejected: torch.Tensor,  # [R]
    block_table: torch.Tensor,  # [R, max_blocks]
    block_size: int,
) -> torch.Tensor:
    """[C] slots where the drafter's context K/V of the target's tokens go.

    Rows of rejected tokens write nothing.
    """
    num_tokens = positions.shape[0]
    start = query_start_loc.to(torch.int64)
    rows = torch.arange(num_rejected.shape[0], device=positions.device)
    request = torch.repeat_interleave(rows, start[1:] - start[:-1], output_size=num_tokens)
    end = start[1:] - num_rejected
    valid = torch.arange(num_tokens, device=positions.device) < end[request]
    return slots_of(positions.to(torch.int64), request, block_table, block_size, valid)
