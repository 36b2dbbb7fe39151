"""Shares of a batch total: draft lengths from scores, verified lengths from survival.

Both are one ranking (Sections 4.3 and 4.4): the ``total`` largest entries of a [R, K]
array whose rows never rise. Equal entries go to the smaller position, then to the lower
request index. Since rows never rise and ties prefer the smaller position, what is
chosen in a row is a prefix, so a length per request says it all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit


def top_prefix_reference(
    values: np.ndarray,  # [R, K]
    limits: Sequence[int],  # [R], most positions a request may get
    total: int,
) -> list[int]:
    """Plain twin of ``top_prefix``.

    Raises:
        ValueError: a negative total, or one above the sum of limits.
    """
    if not 0 <= total <= sum(limits):
        raise ValueError(f"total: got {total}, want 0..{sum(limits)} (the sum of limits)")
    ranked = []
    for r, row in enumerate(np.asarray(values, dtype=np.float64)):
        least = math.inf
        for j in range(limits[r]):
            least = min(least, 0.0 if math.isnan(row[j]) else float(row[j]))
            ranked.append((-least, j, r))
    lengths = [0] * len(values)
    for _, _, r in sorted(ranked)[:total]:
        lengths[r] += 1
    return lengths


def top_prefix(
    values: torch.Tensor,  # [R, K]
    limits: torch.Tensor,  # [R] integer, 0..K
    total: int,
) -> torch.Tensor:
    """Lengths [R] int64 of the ``total`` largest entries inside ``limits``.

    NaN counts as 0, and a running minimum makes rows non-increasing where rounding or
    a NaN broke that. Zero entries are taken last, in tie order, so the lengths sum to
    exactly min(total, sum of limits) whatever the values are: the host has already
    sized the batch by ``total``. Never waits for the device.

    Raises:
        ValueError: values is not [R, K] or total is negative.
    """
    if values.ndim != 2 or total < 0:
        raise ValueError(
            f"need values [R, K] and total >= 0 tokens, got shape {tuple(values.shape)}, {total}"
        )
    if values.is_cuda:
        from forespark.fore_d.kernels import top_prefix_kernel

        return top_prefix_kernel(values, limits, torch.full((1,), total, device=values.device))
    lengths = top_prefix_host(
        values.detach().float().contiguous().numpy(), limits.to(torch.int64).numpy(), total
    )
    return torch.from_numpy(lengths)


def top_prefix_host(
    values: np.ndarray,  # [R, K] float32, contiguous
    limits: np.ndarray,  # [R] integer
    total: int,
) -> np.ndarray:
    """``top_prefix`` on host arrays: the total-th largest value is found without a full sort,
    then everything above it is taken and ties are handed out by the rule."""
    room = np.minimum(np.maximum(limits, 0, dtype=np.int64), values.shape[1])
    inside = _inside(values, room)
    if total >= len(inside):
        return room
    if total == 0:
        return np.zeros_like(room)
    cut = len(inside) - total
    inside.partition(cut)
    return _take(values, room, inside[cut], total)


@njit(cache=True)
def _inside(values: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Entries inside the limits as ``top_prefix`` ranks them, in one flat array."""
    out = np.empty(room.sum(), values.dtype)
    count = 0
    for r in range(len(room)):
        least = np.float32(np.inf)
        for j in range(room[r]):
            # False for NaN too, which ends the row at 0.
            least = min(least, values[r, j]) if values[r, j] > 0 else np.float32(0)
            out[count] = least
            count += 1
    return out


@njit(cache=True)
def _take(values: np.ndarray, room: np.ndarray, least: float, total: int) -> np.ndarray:
    """Lengths of all entries above ``least`` and of so many equal ones that ``total`` is met."""
    R = len(room)
    lengths, ends = np.empty(R, np.int64), np.empty(R, np.int64)
    for r in range(R):
        d = 0
        while d < room[r] and values[r, d] > least:
            d += 1
        lengths[r] = d
        total -= d
        # Zero is the least there is, so then every entry left in the row equals it.
        while d < room[r] and (values[r, d] >= least or least <= 0):
            d += 1
        ends[r] = d
    for j in range(values.shape[1]):
        for r in range(R):
            if total == 0:
                return lengths
            if lengths[r] == j < ends[r]:
                lengths[r] += 1
                total -= 1
    return lengths


def split(
    g: torch.Tensor,  # [R, K] scores
    total: int,  # planned sum of d
    limits: torch.Tensor | None = None,  # [R], None: K for every request
) -> torch.Tensor:
    """Draft lengths d [R] int64 whose sum is ``total`` (at most the sum of limits).

    With fewer positive scores than ``total`` the rest goes to zero-scored positions in
    tie order; a plan made from the same scores never asks for that, one made from the
    previous step's scores may. ``limits`` of 0 keeps a request out (still prefilling).
    """
    if limits is None:
        limits = torch.full((g.shape[0],), g.shape[1], device=g.device)
    return top_prefix(g, limits, total)


def distribute(
    survival: torch.Tensor,  # [R, K] post-draft survival
    lengths: torch.Tensor,  # [R] drafted tokens d
    budget: int,  # B
) -> torch.Tensor:
    """Verified lengths [R] int64 in 0..d: the ``budget`` most likely drafted positions."""
    return top_prefix(survival, lengths, budget)
