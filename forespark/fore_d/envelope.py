"""Scores g from rewards: slopes of the upper concave envelope (Section 4.3).

F_i is the smallest concave function above the running maximum of R_i on {0..K}, so its
slopes g_{i,d} = F_i(d) - F_i(d-1) never rise and never fall below zero: a longer draft
that is worth less than a shorter one is worth nothing extra, never a penalty.

``scores_reference`` walks the hull in plain Python, ``scores_host`` does the same in
numba, ``scores_device`` evaluates the closed form

    g_d = min over a < d of max over b >= d of (R(b) - R(a)) / (b - a)

over all (a, b) at once. Growing d widens the minimum and narrows the maximum, so the
closed form is non-increasing in floating point too, and positions on one hull segment
get bit-equal scores, which the tie rule of ``split`` relies on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit

from forespark.fore_d.survival import rewards, survival


def scores_reference(
    reward: Sequence[float],  # [K], R(1)..R(K)
) -> list[float]:
    """Scores [K] of one request."""
    points = [0.0]
    for value in reward:
        points.append(max(points[-1], float(value)))
    hull = [0]  # indices of the envelope's corners
    for b in range(1, len(points)):
        while len(hull) > 1 and _slope(points, hull[-2], hull[-1]) <= _slope(points, hull[-1], b):
            hull.pop()
        hull.append(b)
    out: list[float] = []
    for a, b in itertools.pairwise(hull):
        out.extend([_slope(points, a, b)] * (b - a))
    return out


def _slope(points: Sequence[float], a: int, b: int) -> float:
    return (points[b] - points[a]) / (b - a)


@njit(cache=True)
def scores_host(reward: np.ndarray) -> np.ndarray:  # [R, K] float32 or float64
    """Numba twin of ``scores_reference`` over requests: [R, K] float64, O(K) a request."""
    R, K = reward.shape
    out = np.empty((R, K), dtype=np.float64)
    points = np.zeros(K + 1)
    hull = np.zeros(K + 1, dtype=np.int64)
    for r in range(R):
        for d in range(K):
            points[d + 1] = max(points[d], reward[r, d])
        top = 0
        for b in range(1, K + 1):
            while top > 0:
                a, m = hull[top - 1], hull[top]
                left = (points[m] - points[a]) / (m - a)
                if left > (points[b] - points[m]) / (b - m):
                    break
                top -= 1
            top += 1
            hull[top] = b
        for corner in range(top):
            a, b = hull[corner], hull[corner + 1]
            for d in range(a, b):
                out[r, d] = (points[b] - points[a]) / (b - a)
    return out


def scores(
    reward: torch.Tensor,  # [R, K] float, R(1)..R(K), no NaN
) -> torch.Tensor:
    """Scores g [R, K] on the rewards' device: non-increasing along K, >= 0.

    A CPU tensor takes the hull walk: K steps a request instead of K^2, on one core.
    """
    if reward.device.type == "cpu":
        return torch.from_numpy(scores_host(reward.contiguous().numpy())).to(reward.dtype)
    return scores_device(reward)


def scores_device(
    reward: torch.Tensor,  # [R, K] float, R(1)..R(K), no NaN
) -> torch.Tensor:
    """Closed-form twin of ``scores`` in plain torch operations."""
    R, K = reward.shape
    points = torch.zeros(R, K + 1, dtype=reward.dtype, device=reward.device)
    points[:, 1:] = reward.clamp(min=0).cummax(dim=1).values
    at = torch.arange(K + 1, device=reward.device)
    gap = at[None, :] - at[:, None]  # [a, b]
    ahead = gap > 0
    slope = (points[:, None, :] - points[:, :, None]) / gap.clamp(min=1)
    slope = slope.masked_fill(~ahead, -torch.inf)
    best = slope.flip(2).cummax(dim=2).values.flip(2)  # [R, a, d]: max over b >= d
    return best.masked_fill(~ahead, torch.inf).amin(dim=1)[:, 1:]


def scores_from_logits(
    z: torch.Tensor,  # [R, T] pre-draft logits
    scale: torch.Tensor,  # [T]
    bias: torch.Tensor,  # [T]
    K: int,
    form: str = "triangle",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits to scores in one call: (g [R, K] float32, bad [R] bool); one kernel on a GPU."""
    if z.is_cuda:
        from forespark.fore_d.kernels import scores_kernel

        return scores_kernel(z, scale, bias, K, form)
    S, bad = survival(z, scale, bias, K, form)
    return scores(rewards(S)), bad
