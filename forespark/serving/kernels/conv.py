"""Grouped convolution over packed blocks: kernel twin of ``conv.grouped_conv``.

Streams every row once per tap (neighbouring rows come from the cache), keeps nothing, and
sums the taps in float32 before one rounding, where the plain form rounds each product to
the model's type. Forward only: the drafter is never trained here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _grouped_conv_kernel(
    hidden_ptr,  # [T, D]
    delta_ptr,  # [T, TAPS, groups]
    base_ptr,  # [TAPS, D]
    offset_ptr,  # [T]
    out_ptr,  # [T, D]
    hidden_stride,
    delta_stride_row,
    delta_stride_tap,
    base_stride,
    D,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row and BLOCK of its columns per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    offset = tl.load(offset_ptr + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        # A row that the block does not reach is never loaded: it may hold anything.
        reached = inside & (offset >= tap + 0 * column)
        value = tl.load(hidden_ptr + (row - tap) * hidden_stride + column, mask=reached, other=0.0)
        fixed = tl.load(base_ptr + tap * base_stride + column, mask=reached, other=0.0)
        moved = delta_ptr + row * delta_stride_row + tap * delta_stride_tap + column // GROUP
        kernel = fixed.to(tl.float32) + tl.load(moved, mask=reached, other=0.0).to(tl.float32)
        total += kernel * value.to(tl.float32)
    tl.store(out_ptr + row * D + column, total, mask=inside)


def grouped_conv_kernel(
    hidden: torch.Tensor,  # [T, groups * group_size], columns contiguous
    delta: torch.Tensor,  # [T, taps, groups], groups contiguous
    base: torch.Tensor,  # [taps, groups * group_size]
    offset: torch.Tensor,  # [T] place of each row in its block; 0 for padding rows
) -> torch.Tensor:
    """Kernel twin of ``conv.grouped_conv``: [T, groups * group_size] in hidden's type."""
    T, D = hidden.shape
    taps, groups = delta.shape[1], delta.shape[2]
    assert hidden.stride(1) == delta.stride(2) == base.stride(1) == offset.stride(0) == 1
    assert offset.shape[0] == T and D % groups == 0
    out = torch.empty(T, D, dtype=hidden.dtype, device=hidden.device)
    if T:
        block = min(1024, triton.next_power_of_2(D))
        _grouped_conv_kernel[(T, triton.cdiv(D, block))](
            hidden, delta, base, offset, out,
            hidden.stride(0), delta.stride(0), delta.stride(1), base.stride(0), D,
            GROUP=D // groups, TAPS=taps, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
