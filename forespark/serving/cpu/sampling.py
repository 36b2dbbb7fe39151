"""CPU twins of the kernels that draw a token from logits.

T = rows of logits, V = vocabulary, R = request slots. Rows at temperature 0 never touch the
noise. Rows above draw by Gumbel-max from the same random stream as the kernel (philox.py).
"""

from __future__ import annotations

import numba as nb
import numpy as np
import torch

from forespark.serving.cpu.philox import add_gumbel, gumbel64, gumbel_key
from forespark.serving.cpu.registry import twin

_GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"


@nb.njit(cache=True, fastmath={"nnan", "nsz", "reassoc"})
def row_max(values):
    """Largest value; the flags let LLVM vectorise it and leave infinities alone."""
    best = values[0]
    for i in range(1, values.shape[0]):
        best = max(best, values[i])
    return best


@nb.njit(cache=True)
def first_argmax(values):
    """(largest value, its first index)."""
    best = row_max(values)
    for i in range(values.shape[0]):
        if values[i] == best:
            return best, i
    return best, 0


@nb.njit(cache=True)
def gumbel_argmax64(logits, temperature, key, first):
    """Argmax of logits / temperature + noise with float64 noise."""
    best = -np.inf
    where = 0
    for i in range(logits.shape[0]):
        value = np.float64(logits[i] / temperature) + gumbel64(key, first + i)
        if value > best:
            best = value
            where = i
    return best, where


@nb.njit(cache=True)
def _sample_blocks(
    out_token,
    out_value,
    logits,
    index,
    seeds,
    positions,
    temperatures,
    block_size,
    drafting,
    divide,
    wide,
):
    vocabulary = logits.shape[1]
    noisy = np.empty(block_size, np.float32)
    for row in range(logits.shape[0]):
        slot = index[row]
        temperature = np.float32(0.0)
        key = np.int64(0)
        if slot >= 0:  # padded rows are greedy
            temperature = np.float32(temperatures[slot])
        if temperature != 0.0:
            key = gumbel_key(seeds[slot], positions[row], drafting)
        scale = temperature if divide else np.float32(1.0)
        for block in range(out_token.shape[1]):
            first = block * block_size
            part = logits[row, first : min(first + block_size, vocabulary)]
            if temperature == 0.0:
                value, where = first_argmax(part)
                out_value[row, block] = value
            elif wide:
                value64, where = gumbel_argmax64(part, scale, key, first)
                out_value[row, block] = value64
            else:
                scored = noisy[: part.shape[0]]
                add_gumbel(key, part, first, scale, scored)
                value, where = first_argmax(scored)
                out_value[row, block] = value
            out_token[row, block] = first + where


def _cache_logits(
    logits: torch.Tensor,  # [T, V]
    cache: torch.Tensor,  # [R, columns, >= V], written
    column: torch.Tensor,  # scalar or [T]
    index: torch.Tensor,  # [T], negative: skip
) -> None:
    """Keep a drafter's logits, before temperature, for the rejection sampler."""
    rows = (index >= 0).nonzero().view(-1)
    columns = column.expand(index.shape[0]) if column.dim() == 0 else column
    cache[index[rows].long(), columns[rows].long(), : logits.shape[1]] = logits[rows].to(
        cache.dtype
    )


@twin(_GUMBEL, "_gumbel_sample_kernel")
def gumbel_sample(
    grid: tuple[int, ...],  # (T, blocks)
    local_argmax: torch.Tensor,  # [T, blocks] int64, written
    local_argmax_stride: int,
    local_max: torch.Tensor,  # [T, blocks] float32 or float64, written
    local_max_stride: int,
    logits_cache: torch.Tensor | None,  # [R, columns, V]
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col: torch.Tensor | None,
    logits: torch.Tensor,  # [T, V]
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [T]
    seeds: torch.Tensor,  # [R] int64
    pos: torch.Tensor,  # [T]
    temp: torch.Tensor,  # [R] float32
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Best token of every block of the vocabulary, greedy or with Gumbel noise."""
    rows = logits[: grid[0], :vocab_size].float()
    if logits_cache is not None:
        assert logits_cache_col is not None
        _cache_logits(rows, logits_cache, logits_cache_col, expanded_idx_mapping[: grid[0]])
    _sample_blocks(
        local_argmax.numpy(),
        local_max.numpy(),
        rows.numpy(),
        expanded_idx_mapping.numpy(),
        seeds.numpy(),
        pos.numpy(),
        temp.numpy(),
        BLOCK_SIZE,
        IS_DRAFTING,
        APPLY_TEMPERATURE,
        USE_FP64,
    )


@twin(_GUMBEL, "_temperature_kernel")
def temperature(
    grid: tuple[int, ...],
    logits: torch.Tensor,  # [T, V] float32, divided in place
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row by its temperature; 0 (greedy) leaves it alone."""
    scale = temperature[expanded_idx_mapping.long()].float()
    scale = torch.where(scale == 0.0, 1.0, scale)
    logits[: grid[0], :vocab_size].div_(scale.unsqueeze(1))
