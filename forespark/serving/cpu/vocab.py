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


def as_numpy32(x: torch.Tensor) -> np.ndarray:
    """The tensor as float32 NumPy: a view when it is float32 already, else a copy."""
    return (x if x.dtype == torch.float32 else x.float()).numpy()


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


def block_max_sumexp(
    row: np.ndarray,  # [V] float32
    temperature: np.float32,  # divides the logits first; 1.0 leaves them as they are
    block: int,
    maxima: np.ndarray,  # [blocks] out: each block's maximum
    sums: np.ndarray,  # [blocks] out: sum of exp(logit - maximum); 0 where all are -inf
) -> None:
    """Per-block parts of a log-sum-exp; ``log_sum_exp`` puts them together."""
    whole = len(row) // block
    maxima[:whole] = row[: whole * block].reshape(whole, block).max(axis=1)
    if whole < len(maxima):
        maxima[whole] = row[whole * block :].max()
    for index in np.flatnonzero(np.isnan(maxima)):
        maxima[index] = np.fmax.reduce(row[index * block : (index + 1) * block])
    maxima /= temperature  # division by a positive number keeps the order
    _block_sumexp(row, temperature, block, maxima, sums)


@njit(cache=True)
def _block_sumexp(row, temperature, block, maxima, sums):
    scratch = np.empty(block, np.float32)
    for index in range(maxima.shape[0]):
        sums[index] = 0.0
        if maxima[index] > -np.inf:
            part = row[index * block : (index + 1) * block]
            for i in range(part.shape[0]):
                scratch[i] = exp32(part[i] / temperature - maxima[index])
            sums[index] = total(scratch[: part.shape[0]])


@njit(cache=True, fastmath={"reassoc"})
def total(x):
    """Float32 sum. Only here may LLVM reorder additions, which is what vectorises them."""
    acc = np.float32(0.0)
    for i in range(x.shape[0]):
        acc += x[i]
    return acc


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
