"""Reductions over the vocabulary, block by block, shared by the sampling twins.

vLLM's kernels reduce each block of the vocabulary on its own program and combine the blocks
later, so the twins keep the blocks: what they write is what the kernels write. NaN follows
Triton's reductions: a maximum ignores it, a sum keeps it.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from forespark.serving.cpu.simd import exp32

CHUNK = 256  # entries handled together: long enough for vector units, short enough to skip


def as_numpy32(x: torch.Tensor) -> np.ndarray:
    """The tensor as float32 NumPy: a view when it is float32 already, else a copy."""
    return (x if x.dtype == torch.float32 else x.float()).numpy()


def draft_row(
    draft_logits: torch.Tensor,  # [S, K, V]
    slot: int,
    step: int,
    vocab_size: int,
) -> np.ndarray:
    """One request's logits at one draft step, [vocab_size] float32, without a copy if so held."""
    # Plain ints: torch takes NumPy integers for index arrays and copies the row.
    return as_numpy32(draft_logits[int(slot), int(step), :vocab_size])


def block_argmax(
    row: np.ndarray,  # [V] float
    block: int,  # tokens per block; the last block may be shorter
    values: np.ndarray,  # [blocks] out: each block's maximum
    tokens: np.ndarray,  # [blocks] out: its token id, the lowest of equals
) -> None:
    """Maximum and token of each block. A block of nothing but NaN gives -inf, first token."""
    whole = len(row) // block
    body = row[: whole * block].reshape(whole, block)
    tokens[:whole] = body.argmax(axis=1)
    values[:whole] = body[np.arange(whole), tokens[:whole]]
    if whole < len(values):
        tokens[whole] = row[whole * block :].argmax()
        values[whole] = row[whole * block + tokens[whole]]
    tokens += np.arange(len(tokens)) * block
    if np.isnan(values).any():  # argmax stops at the first NaN, Triton's steps over it
        block_argmax(np.where(np.isnan(row), -np.inf, row), block, values, tokens)


@njit(cache=True)
def some_above(x, floor):
    """Whether any entry is above ``floor`` or NaN: a vectorised test of a whole chunk."""
    count = np.int32(0)
    for i in range(x.shape[0]):
        count += np.int32(0) if x[i] <= floor else np.int32(1)
    return count > 0


@njit(cache=True)
def maximum(x):
    """Largest entry, stepping over NaN; NaN if there is nothing else."""
    # Independent lanes, because the order of one running maximum cannot be vectorised.
    lanes = np.full(CHUNK, -np.inf, np.float32)
    for start in range(0, x.shape[0], CHUNK):
        part = x[start : min(start + CHUNK, x.shape[0])]
        for i in range(part.shape[0]):
            lanes[i] = part[i] if part[i] > lanes[i] else lanes[i]
    top = lanes[0]
    for value in lanes:
        top = value if value > top else top
    if top == -np.inf:
        for value in x:
            if value == -np.inf:
                return top
        top = np.float32(np.nan)
    return top


@njit(cache=True, fastmath={"reassoc"})
def total(x):
    """Float32 sum. Only here may LLVM reorder additions, which is what vectorises them."""
    acc = np.float32(0.0)
    for i in range(x.shape[0]):
        acc += x[i]
    return acc


@njit(cache=True)
def sum_exp(x, temperature, top):
    """Sum of exp(x / temperature - top), float32.

    Chunks whose every term is below 2e-38 are passed over: a drafter that scores a few
    candidates leaves all other logits at -inf.
    """
    lanes = np.zeros(CHUNK, np.float32)
    floor = (top - np.float32(87.0)) * temperature
    for start in range(0, x.shape[0], CHUNK):
        part = x[start : min(start + CHUNK, x.shape[0])]
        if some_above(part, floor):
            for i in range(part.shape[0]):
                lanes[i] += exp32(part[i] / temperature - top)
    return total(lanes)


@njit(cache=True)
def block_max_sumexp(
    row,  # [V] float32
    temperature,  # float32, divides the logits first; 1.0 leaves them as they are
    block,  # tokens per block; the last block may be shorter
    maxima,  # [blocks] out: each block's maximum
    sums,  # [blocks] out: sum of exp(logit - maximum); 0 where all are -inf
):
    """Per-block parts of a log-sum-exp; ``log_sum_exp`` puts them together."""
    for index in range(maxima.shape[0]):
        part = row[index * block : min((index + 1) * block, row.shape[0])]
        top = maximum(part) / temperature  # division by a positive number keeps the order
        maxima[index] = top
        sums[index] = sum_exp(part, temperature, top) if top > -np.inf else np.float32(0.0)


@njit(cache=True)
def log_sum_exp(
    maxima,  # [blocks] float32
    sums,  # [blocks] float32
):
    """log of the sum of exp over all blocks, float32; NaN when every logit is -inf."""
    top = np.float32(-np.inf)
    for m in maxima:
        if m > top:
            top = m
    acc = np.float32(0.0)
    for i in range(maxima.shape[0]):
        acc += sums[i] * np.exp(maxima[i] - top)
    return np.float32(top + np.log(acc))


@njit(cache=True)
def best_block(values):
    """Index of the largest value, the first of equals; NaN counts as -inf."""
    best = 0
    top = -np.inf
    for i in range(values.shape[0]):
        if values[i] > top:
            top = values[i]
            best = i
    return best
