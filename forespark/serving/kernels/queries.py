"""Inputs of the packed drafter pass from lengths that stay on the device.

Kernel twin of ``packed.prepare_queries``: token ids, positions, block boundaries, sequence
lengths, cache slots, and where every draft position is read. The host knows the number of
draft tokens it planned, but neither who got them nor how many requests draft at all, so it
pads to a number of tokens that is large enough.

One program per request sums the lengths before its own (R^2 reads of a few KiB, all from
the cache) instead of waiting for a scan in a launch of its own. More programs write the
padding: what an earlier, larger batch left there may not be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from forespark.serving.packed import Anchors, Blocks, CacheGroup, QueryBuffers

TILE = 256  # padding entries per program


@triton.jit
def _queries_kernel(
    lengths_ptr,  # [R]
    token_ptr,  # [R] anchors
    position_ptr,  # [R] of the token before each anchor
    table_ptr,  # [R, table_width]
    ids_ptr,  # [>= num_tokens] out, like the next four
    positions_ptr,
    offset_ptr,
    request_ptr,
    slots_ptr,
    start_ptr,  # [max_requests + 1] out
    seq_lens_ptr,  # [max_requests] out
    draft_request_ptr,  # [num_drafts] out, like the next two
    draft_step_ptr,
    draft_token_ptr,
    R,
    num_tokens,
    num_drafts,
    max_requests,
    mask_token,
    max_model_len,
    table_stride,
    table_width,
    block_size,
    ROWS: tl.constexpr,  # power of two that holds R
    WIDTH: tl.constexpr,  # power of two that holds K + 1
    TAIL: tl.constexpr,  # power of two that holds max_requests + 1
    TILE: tl.constexpr,
    INPUTS: tl.constexpr,  # False: only the slots of one more cache group
):
    program = tl.program_id(0)
    r = tl.arange(0, ROWS)
    lengths = tl.load(lengths_ptr + r, mask=r < R, other=0).to(tl.int32)
    widths = tl.where(lengths > 0, lengths + 1, 0)
    if program < R:
        start = tl.sum(tl.where(r < program, widths, 0), axis=0)
        length = tl.sum(tl.where(r == program, lengths, 0), axis=0)
        width = tl.sum(tl.where(r == program, widths, 0), axis=0)
        offset = tl.arange(0, WIDTH)
        row = start + offset
        inside = (offset < width) & (row < num_tokens)
        before = tl.load(position_ptr + program).to(tl.int64)
        position = before + 1 + offset
        column = position // block_size
        cached = inside & (position < max_model_len) & (column < table_width)
        entry = table_ptr + program.to(tl.int64) * table_stride + column
        block = tl.load(entry, mask=cached, other=0).to(tl.int64)
        slot = tl.where(block != 0, block * block_size + position % block_size, -1)
        tl.store(slots_ptr + row, slot, mask=inside)
        if INPUTS:
            anchor = tl.load(token_ptr + program)
            tl.store(ids_ptr + row, tl.where(offset == 0, anchor, mask_token), mask=inside)
            tl.store(positions_ptr + row, tl.minimum(position, max_model_len - 1), mask=inside)
            tl.store(offset_ptr + row, offset, mask=inside)
            tl.store(request_ptr + row, program + 0 * offset, mask=inside)
            tl.store(start_ptr + program, tl.minimum(start, num_tokens))
            end = before + 2 + length
            tl.store(seq_lens_ptr + program, tl.minimum(end, max_model_len))
            draft = tl.sum(tl.where(r < program, lengths, 0), axis=0) + offset
            drafted = (offset < length) & (draft < num_drafts)
            tl.store(draft_request_ptr + draft, program + 0 * offset, mask=drafted)
            tl.store(draft_step_ptr + draft, offset, mask=drafted)
            tl.store(draft_token_ptr + draft, tl.minimum(row + 1, num_tokens - 1), mask=drafted)
    else:
        used = tl.sum(widths, axis=0)
        at = (program - R) * TILE + tl.arange(0, TILE)
        padding = (at >= used) & (at < num_tokens)
        tl.store(slots_ptr + at, -1, mask=padding)
        if INPUTS:
            tl.store(ids_ptr + at, mask_token, mask=padding)
            tl.store(positions_ptr + at, 0, mask=padding)
            tl.store(offset_ptr + at, 0, mask=padding)
            tl.store(request_ptr + at, 0, mask=padding)
            idle = (at >= tl.sum(lengths, axis=0)) & (at < num_drafts)
            tl.store(draft_request_ptr + at, 0, mask=idle)
            tl.store(draft_step_ptr + at, 0, mask=idle)
            tl.store(draft_token_ptr + at, 0, mask=idle)
            if program == R:
                tail = tl.arange(0, TAIL)
                tl.store(
                    start_ptr + tail,
                    tl.minimum(used, num_tokens),
                    mask=(tail >= R) & (tail <= max_requests),
                )
                tl.store(seq_lens_ptr + tail, 0, mask=(tail >= R) & (tail < max_requests))


def prepare_queries_kernel(
    lengths: torch.Tensor,  # [R]
    anchors: Anchors,
    num_tokens: int,
    num_drafts: int,
    K: int,
    buffers: QueryBuffers,
    groups: list[CacheGroup],
) -> Blocks:
    """Kernel twin of ``packed.prepare_queries``: one launch per cache group."""
    from forespark.serving.packed import Blocks

    R, device = lengths.shape[0], lengths.device
    max_requests = buffers.seq_lens.shape[0]
    assert groups and 0 < num_tokens <= buffers.input_ids.shape[0] and max_requests >= R
    request = torch.empty(num_tokens, dtype=torch.int64, device=device)
    drafts = torch.empty(3, num_drafts, dtype=torch.int64, device=device)
    tiles = triton.cdiv(max(num_tokens, num_drafts), TILE)
    for index, group in enumerate(groups):
        assert group.table.stride(1) == 1 and group.slots.shape[0] >= num_tokens
        _queries_kernel[(R + tiles,)](
            lengths.contiguous(), anchors.token, anchors.position, group.table,
            buffers.input_ids, buffers.positions, buffers.offsets, request, group.slots,
            buffers.query_start_loc, buffers.seq_lens, drafts[0], drafts[1], drafts[2],
            R, num_tokens, num_drafts, max_requests, buffers.mask_token, buffers.max_model_len,
            group.table.stride(0), group.table.shape[1], group.block_size,
            ROWS=triton.next_power_of_2(max(R, 1)), WIDTH=triton.next_power_of_2(K + 1),
            TAIL=triton.next_power_of_2(max_requests + 1), TILE=TILE, INPUTS=index == 0,
            num_warps=4,
        )  # fmt: skip
    return Blocks(
        start=buffers.query_start_loc[: R + 1],
        request=request,
        offset=buffers.offsets[:num_tokens],
        draft_request=drafts[0],
        draft_step=drafts[1],
        draft_token=drafts[2],
    )
