"""Triton kernels of the scheduler: scores from logits, and shares of a total.

Each is one launch and never waits for the device, so both can stand inside a captured
graph: sizes are launch constants, the total is read from device memory. Their plain twins
are ``envelope.scores_from_logits`` and ``split.top_prefix``, which a reader should read
first. Values equal the twins' up to float32 rounding, choices are the same for the same
values, ties included. Tested in Triton's interpreter; not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forespark.fore_d.survival import check_logits

MAX_REQUESTS = 4096  # one program ranks the whole batch in registers


@triton.jit
def _scores_kernel(
    z_ptr,  # [R, T]
    scale_ptr,  # [T]
    bias_ptr,  # [T]
    g_ptr,  # [R, K] out
    bad_ptr,  # [R] out
    z_stride,
    K: tl.constexpr,
    P: tl.constexpr,  # power of two above K: room for lengths 0..K
    TRIANGLE: tl.constexpr,
):
    """One request per program. Rows are draft lengths 0..K, columns positions or lengths."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, P)
    row, column = index[:, None], index[None, :]
    drafted = (column < row) & (row <= K)
    if TRIANGLE:
        entry = row * (row - 1) // 2 + column
    else:
        entry = column + 0 * row
    scale = tl.load(scale_ptr + entry, mask=drafted, other=0.0)
    bias = tl.load(bias_ptr + entry, mask=drafted, other=0.0)
    z = tl.load(z_ptr + request * z_stride + entry, mask=drafted, other=0.0).to(tl.float32)
    logit = z * scale + bias
    bad = tl.max(tl.max(((logit != logit) & drafted).to(tl.int32), axis=1), axis=0)
    # e^-x overflows to infinity for very negative x, and 1 / infinity is the right 0.
    accept = tl.where(drafted & (bad == 0), 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    reward = tl.sum(tl.cumprod(accept, axis=1), axis=1)  # [P], R(0) = 0
    never_less = tl.where(column <= row, reward[None, :], 0.0)
    point = tl.max(never_less, axis=1)
    # Slope from length a (rows) to length b (columns).
    gap = column - row
    slope = (point[None, :] - point[:, None]) / tl.maximum(gap, 1).to(tl.float32)
    ahead = (gap > 0) & (column <= K)
    g = tl.zeros([P], dtype=tl.float32)
    for d in tl.static_range(1, K + 1):
        steepest = tl.max(tl.where(ahead & (column >= d), slope, float("-inf")), axis=1)
        score = tl.min(tl.where(index < d, steepest, float("inf")), axis=0)
        g = tl.where(index == d, score, g)
    tl.store(g_ptr + request * K + index - 1, g, mask=(index >= 1) & (index <= K))
    tl.store(bad_ptr + request, bad.to(tl.int8))


def scores_kernel(
    z: torch.Tensor,  # [R, T] pre-draft logits, any float dtype
    scale: torch.Tensor,  # [T] float32
    bias: torch.Tensor,  # [T] float32
    K: int,
    form: str = "triangle",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel twin of ``envelope.scores_from_logits``: (g [R, K] float32, bad [R] bool).

    Raises:
        ValueError: z has another number of entries than K and form ask for.
    """
    check_logits(z, K, form)
    assert z.shape[0] == 0 or z.stride(1) == 1
    assert scale.is_contiguous() and bias.is_contiguous()
    R = z.shape[0]
    g = torch.empty(R, K, dtype=torch.float32, device=z.device)
    bad = torch.empty(R, dtype=torch.bool, device=z.device)
    if R:
        _scores_kernel[(R,)](
            z, scale, bias, g, bad.view(torch.int8), z.stride(0),
            K=K, P=triton.next_power_of_2(K + 1), TRIANGLE=form == "triangle", num_warps=1,
        )  # fmt: skip
    return g, bad


@triton.jit
def _top_prefix_kernel(
    values_ptr,  # [R, K]
    limits_ptr,  # [R]
    total_ptr,  # [1]
    lengths_ptr,  # [R] out
    R,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # powers of two that hold R and K
    COLUMNS: tl.constexpr,
):
    """The whole batch in one program: bisection for the smallest chosen value, then ties."""
    r = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    inside = (r[:, None] < R) & (j[None, :] < K)
    value = tl.load(values_ptr + r[:, None] * K + j[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32)
    value = tl.where(value > 0.0, value, 0.0)  # NaN and negative count as 0
    # Running minimum along a row, column by column: rows may rise by rounding.
    least = tl.full([ROWS], float("inf"), dtype=tl.float32)
    lowered = value
    for step in tl.static_range(K):
        here = tl.sum(tl.where(j[None, :] == step, value, 0.0), axis=1)
        least = tl.minimum(least, here)
        lowered = tl.where(j[None, :] == step, least[:, None], lowered)
    limit = tl.load(limits_ptr + r, mask=r < R, other=0).to(tl.int32)
    inside &= j[None, :] < limit[:, None]
    # Bits of a float that is not negative order like the float itself.
    key = tl.where(inside, lowered.to(tl.int32, bitcast=True), -1)
    present = tl.sum(tl.sum(inside.to(tl.int32), axis=1), axis=0)
    total = tl.minimum(tl.load(total_ptr).to(tl.int32), present)
    smallest = total * 0
    for bit in tl.static_range(31):
        higher = smallest | (1 << (30 - bit))
        count = tl.sum(tl.sum((key >= higher).to(tl.int32), axis=1), axis=0)
        smallest = tl.where(count >= total, higher, smallest)
    above = key > smallest
    tied = inside & (key == smallest)
    left = total - tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0)
    # Ties go to the smaller position, then to the lower request.
    per_position = tl.sum(tied.to(tl.int32), axis=0)
    before = tl.cumsum(per_position, axis=0) - per_position
    rank = tl.cumsum(tied.to(tl.int32), axis=0) - 1 + before[None, :]
    chosen = above | (tied & (rank < left))
    tl.store(lengths_ptr + r, tl.sum(chosen.to(tl.int32), axis=1).to(tl.int64), mask=r < R)


def top_prefix_kernel(
    values: torch.Tensor,  # [R, K]
    limits: torch.Tensor,  # [R] integer, 0..K
    total: torch.Tensor,  # [1] integer, on the device: a replayed graph reads a new one
) -> torch.Tensor:
    """Kernel twin of ``split.top_prefix``: lengths [R] int64.

    Raises:
        ValueError: values is not [R, K], or has more requests than one program holds.
    """
    if values.ndim != 2 or values.shape[0] > MAX_REQUESTS:
        raise ValueError(
            f"need values [R, K] with R <= {MAX_REQUESTS}, got shape {tuple(values.shape)}"
        )
    R, K = values.shape
    lengths = torch.zeros(R, dtype=torch.int64, device=values.device)
    if R and K:
        rows, columns = triton.next_power_of_2(R), triton.next_power_of_2(K)
        _top_prefix_kernel[(1,)](
            values.contiguous(), limits, total, lengths, R, K=K, ROWS=rows, COLUMNS=columns,
            num_warps=max(1, min(32, rows * columns // 256)),
        )  # fmt: skip
    return lengths
