"""Survival and reward of a draft, before and after it exists (Sections 4.2 and 4.4).

Pre-draft logits come in two forms. ``triangle``: z [R, K(K+1)/2], row d (1..K) has d
entries at offset d(d-1)/2. ``row``: z [R, K], one curve that every length reads a
prefix of (directional drafters, and the single-curve arm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

FORMS = ("triangle", "row")


def entries(K: int, form: str) -> int:
    """Number of pre-draft logits per request.

    Raises:
        ValueError: unknown form or K < 1.
    """
    if form not in FORMS or K < 1:
        raise ValueError(f"pre-draft form: got {form!r} with K={K}, want one of {FORMS} and K >= 1")
    return K * (K + 1) // 2 if form == "triangle" else K


def check_logits(z: torch.Tensor, K: int, form: str) -> None:
    """Refuse logits that are not [R, T] with the T that K and form ask for (ValueError)."""
    if z.ndim != 2 or z.shape[1] != entries(K, form):
        raise ValueError(
            f"pre-draft logits: got shape {tuple(z.shape)}, want [R, {entries(K, form)}] "
            f"for form {form!r} and K={K}"
        )


def row_offset(d: int, form: str) -> int:
    """Offset of the first entry that a length-d draft reads."""
    return d * (d - 1) // 2 if form == "triangle" else 0


def last_row(
    values: torch.Tensor,  # [..., K(K+1)/2] triangle layout
    K: int,
) -> torch.Tensor:
    """Row K of a triangle, [..., K]: what the single-curve arm reads for every d."""
    return values[..., row_offset(K, "triangle") :]


def survival_reference(
    z: np.ndarray,  # [R, T]
    scale: np.ndarray,  # [T]
    bias: np.ndarray,  # [T]
    K: int,
    form: str = "triangle",
) -> tuple[np.ndarray, np.ndarray]:
    """Plain twin of ``survival``, in float64: (S [R, K, K], bad [R])."""
    out = np.zeros((len(z), K, K))
    bad = np.zeros(len(z), dtype=bool)
    for r, row in enumerate(np.asarray(z, dtype=np.float64)):
        logits = [a * x + b for x, a, b in zip(row, scale, bias, strict=True)]
        bad[r] = any(math.isnan(x) for x in logits)
        if bad[r]:
            continue
        for d in range(1, K + 1):
            alive = 1.0
            for j in range(d):
                alive *= _sigmoid(logits[row_offset(d, form) + j])
                out[r, d - 1, j] = alive
    return out, bad


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x)) if x > -700 else 0.0


@lru_cache(maxsize=32)
def _layout(K: int, form: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather index [K*K] into z and mask [K, K] of the entries with j <= d."""
    index = torch.zeros(K, K, dtype=torch.int64)
    for d in range(1, K + 1):
        index[d - 1, :d] = row_offset(d, form) + torch.arange(d)
    mask = torch.ones(K, K, dtype=torch.bool).tril()
    return index.reshape(-1).to(device), mask.to(device)


def survival(
    z: torch.Tensor,  # [R, T], any float dtype
    scale: torch.Tensor,  # [T] float32
    bias: torch.Tensor,  # [T] float32
    K: int,
    form: str = "triangle",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Survival S[i, d, j] = prod over t <= j of sigmoid(a z + b), row d (Eq. 3).

    Never waits for the device. A request with a NaN in any calibrated logit gets
    survival 0 everywhere; the caller counts ``bad``.

    Returns:
        S: [R, K, K] float32, S[:, d-1, j-1]; 0 where j > d.
        bad: [R] bool, requests whose estimate held a NaN.

    Raises:
        ValueError: z has another number of entries than K and form ask for.
    """
    check_logits(z, K, form)
    index, mask = _layout(K, form, z.device)
    logits = z.float() * scale + bias
    bad = logits.isnan().any(dim=1)
    accept = torch.sigmoid(logits).index_select(1, index).view(-1, K, K)
    accept = torch.where(mask & ~bad[:, None, None], accept, 0.0)
    return accept.cumprod(dim=2), bad


def rewards(
    S: torch.Tensor,  # [R, K, K]
) -> torch.Tensor:
    """R_i(d) = sum over j <= d of S[i, d, j], [R, K] for d = 1..K; R_i(0) = 0 is implied."""
    return S.sum(dim=2)


def post_survival_reference(
    logits: np.ndarray,  # [R, K]
    theta: Sequence[float],  # [K]
    lengths: Sequence[int],  # [R]
) -> tuple[np.ndarray, np.ndarray]:
    """Plain twin of ``post_survival``, in float64: (S [R, K], bad [R])."""
    out = np.zeros(logits.shape)
    bad = np.zeros(len(logits), dtype=bool)
    for r, (row, d) in enumerate(zip(logits, lengths, strict=True)):
        bad[r] = any(math.isnan(x) for x in row[:d])
        alive = 0.0 if bad[r] else 1.0
        for j in range(d):
            alive = alive and alive * _sigmoid(float(row[j]) / theta[j])
            out[r, j] = alive
    return out, bad


def post_survival(
    logits: torch.Tensor,  # [R, K], any float dtype; entries past a draft's end are ignored
    theta: torch.Tensor,  # [K] float32, > 0
    lengths: torch.Tensor,  # [R] integer, drafted tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Survival of drafted positions, prod over t <= j of sigmoid(l / theta) (Eq. 5, App. B).

    Returns:
        S: [R, K] float32; 0 past a draft's end and for requests with a NaN inside it.
        bad: [R] bool, requests whose drafted positions held a NaN.
    """
    if logits.is_cuda:
        from forespark.fore_d.kernels import post_survival_kernel

        return post_survival_kernel(logits, theta, lengths)
    inside = torch.arange(logits.shape[1], device=logits.device) < lengths[:, None]
    scaled = logits.float() / theta
    bad = (scaled.isnan() & inside).any(dim=1)
    accept = torch.where(inside & ~bad[:, None], torch.sigmoid(scaled), 0.0)
    return accept.cumprod(dim=1), bad
