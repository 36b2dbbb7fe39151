"""Triton kernels of the scheduler: scores and survival from logits, and shares of a total.

Each is one launch and never waits for the device, so all can stand inside a captured graph:
sizes are launch constants, the total is read from device memory. Their plain twins are
``envelope.scores_from_logits``, ``survival.post_survival`` and ``split.top_prefix``, which a
reader should read first. Values equal the twins' up to float32 rounding, choices are the same
for the same values, ties included.

Ranking sorts nothing. A row never rises, so how many of its entries reach a threshold is
found by bisection, and the threshold that leaves just enough entries by bisection over the
31 bits of a non-negative float, whose integer order is the float's. One program serves the
whole batch: 31 x log2(K) short steps whatever R is, and a barrier instead of a second
launch. Running minima go through a scratch of [K, R] keys, which stays in the cache.

Tested in Triton's interpreter and compiled for sm_90; not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forespark.fore_d.survival import check_logits

MAX_REQUESTS = 4096  # one program ranks the whole batch


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
def _post_survival_kernel(
    logits_ptr,  # [R, K]
    theta_ptr,  # [K]
    lengths_ptr,  # [R]
    survival_ptr,  # [R, K] out
    bad_ptr,  # [R] out
    stride,
    R,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two that holds K
    ROWS: tl.constexpr,  # requests of one program
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    length = tl.load(lengths_ptr + r, mask=r < R, other=0)
    inside = (j[None, :] < length[:, None]) & (j[None, :] < K)
    theta = tl.load(theta_ptr + j, mask=j < K, other=1.0)
    logit = tl.load(logits_ptr + r[:, None] * stride + j[None, :], mask=inside, other=0.0)
    logit = logit.to(tl.float32) / theta[None, :]
    bad = tl.max(((logit != logit) & inside).to(tl.int32), axis=1)
    accept = tl.where(inside & (bad == 0)[:, None], 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    where = r[:, None] * K + j[None, :]
    written = (r < R)[:, None] & (j < K)[None, :]
    tl.store(survival_ptr + where, tl.cumprod(accept, axis=1), mask=written)
    tl.store(bad_ptr + r, bad.to(tl.int8), mask=r < R)


def post_survival_kernel(
    logits: torch.Tensor,  # [R, K], any float dtype, rows contiguous
    theta: torch.Tensor,  # [K] float32, > 0
    lengths: torch.Tensor,  # [R] integer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel twin of ``survival.post_survival``: (S [R, K] float32, bad [R] bool)."""
    R, K = logits.shape
    survival = torch.empty(R, K, dtype=torch.float32, device=logits.device)
    bad = torch.empty(R, dtype=torch.bool, device=logits.device)
    assert R == 0 or logits.stride(1) == 1
    if R:
        rows = 16
        _post_survival_kernel[(triton.cdiv(R, rows),)](
            logits, theta, lengths.contiguous(), survival, bad.view(torch.int8),
            logits.stride(0), R, K=K, COLUMNS=triton.next_power_of_2(K), ROWS=rows, num_warps=2,
        )  # fmt: skip
    return survival, bad


@triton.jit
def _reaching(
    keys_ptr,  # [K, ROWS], never rising along K
    threshold,
    low,  # [ROWS] bounds of the answer, both included
    high,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """[ROWS] entries of each row that reach ``threshold``."""
    r = tl.arange(0, ROWS)
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open = low < high
        key = tl.load(keys_ptr + middle * ROWS + r, mask=open, other=-1)
        reaches = key >= threshold
        low = tl.where(open, tl.where(reaches, middle + 1, low), low)
        high = tl.where(open, tl.where(reaches, high, middle), high)
    return low


@triton.jit
def _top_prefix_kernel(
    values_ptr,  # [R, K]
    limits_ptr,  # [R]
    total_ptr,  # [1]
    keys_ptr,  # [K, ROWS] scratch, int32
    lengths_ptr,  # [R] out
    stride,
    R,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # power of two that holds R
    STEPS: tl.constexpr,  # bisection steps over 0..K
):
    r = tl.arange(0, ROWS)
    real = r < R
    limit = tl.load(limits_ptr + r, mask=real, other=0).to(tl.int32)
    limit = tl.minimum(tl.maximum(limit, 0), K)
    least = tl.full([ROWS], float("inf"), dtype=tl.float32)
    for j in tl.static_range(K):
        value = tl.load(values_ptr + r.to(tl.int64) * stride + j, mask=real, other=0.0)
        value = value.to(tl.float32)
        # NaN and negative count as 0; the running minimum mends rows that rise by rounding.
        least = tl.minimum(least, tl.where(value > 0.0, value, 0.0))
        tl.store(keys_ptr + j * ROWS + r, least.to(tl.int32, bitcast=True))
    tl.debug_barrier()  # threads read keys that other threads wrote
    total = tl.minimum(tl.load(total_ptr).to(tl.int32), tl.sum(limit, axis=0))
    # The largest key that enough entries reach; `above` of each row exceed it.
    smallest = total * 0
    above = limit * 0
    reach = limit
    for bit in range(31):
        higher = smallest + (1 << (30 - bit))
        count = _reaching(keys_ptr, higher, above, reach, ROWS, STEPS)
        enough = tl.sum(count, axis=0) >= total
        smallest = tl.where(enough, higher, smallest)
        reach = tl.where(enough, count, reach)
        above = tl.where(enough, above, count)
    # Ties are the positions above..reach of each row. They go to the smaller position,
    # then to the lower request: whole positions as long as they fit, and part of one.
    left = total - tl.sum(above, axis=0)
    whole = total * 0
    most = whole + K
    for _ in tl.static_range(STEPS):
        middle = (whole + most + 1) // 2
        tied = tl.minimum(tl.maximum(middle - above, 0), reach - above)
        fits = tl.sum(tied, axis=0) <= left
        whole = tl.where(fits, middle, whole)
        most = tl.where(fits, most, middle - 1)
    taken = tl.minimum(tl.maximum(whole - above, 0), reach - above)
    left -= tl.sum(taken, axis=0)
    part = ((above <= whole) & (whole < reach)).to(tl.int32)
    part = tl.where(tl.cumsum(part, axis=0) <= left, part, 0)
    tl.store(lengths_ptr + r, (above + taken + part).to(tl.int64), mask=real)


def top_prefix_kernel(
    values: torch.Tensor,  # [R, K], rows contiguous
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
        if values.stride(1) != 1:
            values = values.contiguous()
        rows = triton.next_power_of_2(R)
        keys = torch.empty(K, rows, dtype=torch.int32, device=values.device)
        _top_prefix_kernel[(1,)](
            values, limits.contiguous(), total, keys, lengths, values.stride(0), R,
            K=K, ROWS=rows, STEPS=K.bit_length(), num_warps=max(1, min(32, rows // 64)),
        )  # fmt: skip
    return lengths
