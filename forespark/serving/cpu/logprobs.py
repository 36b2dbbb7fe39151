"""CPU twins of the kernels behind log-probabilities, ranks and NaN counting.

T = rows of logits, V = vocabulary, C = tokens asked for per row.
"""

from __future__ import annotations

import numba as nb
import torch

from forespark.serving.cpu.registry import twin

_LOGPROB = "vllm.v1.worker.gpu.sample.logprob"


@twin(_LOGPROB, "_topk_log_softmax_kernel")
def topk_log_softmax(
    grid: tuple[int, ...],
    output: torch.Tensor,  # [T, C] float32, written
    logits: torch.Tensor,  # [T, V]
    logits_stride: int,
    topk_ids: torch.Tensor,  # [T, C] int64
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Log-probability of the given tokens."""
    rows = logits[: grid[0], :vocab_size].float()
    normalizer = rows.logsumexp(dim=1, keepdim=True)
    output[: grid[0]] = rows.gather(1, topk_ids[: grid[0]]) - normalizer


@twin(_LOGPROB, "_ranks_kernel")
def ranks(
    grid: tuple[int, ...],
    output: torch.Tensor,  # [T] int64, written
    logits: torch.Tensor,
    logits_stride: int,
    token_ids: torch.Tensor,  # [T]
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Rank of each row's token, ties counted as better: 1 is the likeliest."""
    rows = logits[: grid[0], :vocab_size]
    chosen = rows.gather(1, token_ids[: grid[0]].long().unsqueeze(1))
    output[: grid[0]] = (rows >= chosen).sum(dim=1)


@nb.njit(cache=True)
def _fill(num_rows, out, valid, sampled, topk, index, num_custom, custom, num_topk):
    for row in range(num_rows):
        out[row, 0] = sampled[row]
        valid[row, 0] = True
        slot = index[row]
        wanted = num_custom[slot]
        for column in range(wanted if wanted > 0 else num_topk):
            token = custom[slot, column] if wanted > 0 else topk[row, column]
            out[row, 1 + column] = token
            valid[row, 1 + column] = True


@twin(_LOGPROB, "_fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(
    grid: tuple[int, ...],
    out_token_ids: torch.Tensor,  # [T, 1 + C], written
    out_token_ids_stride: int,
    out_valid_mask: torch.Tensor,  # [T, 1 + C] bool, written
    out_valid_mask_stride: int,
    sampled_token_ids: torch.Tensor,  # [T]
    topk_indices: torch.Tensor,  # [T, NUM_TOPK], unread when NUM_TOPK is 0
    topk_indices_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [T]
    num_per_req_token_ids: torch.Tensor,  # [R]
    per_req_token_ids: torch.Tensor,  # [R, most]
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """The sampled token, then a request's own token list or else the likeliest tokens."""
    _fill(
        grid[0],
        out_token_ids.numpy(),
        out_valid_mask.numpy(),
        sampled_token_ids.numpy(),
        topk_indices.numpy(),
        expanded_idx_mapping.numpy(),
        num_per_req_token_ids.numpy(),
        per_req_token_ids.numpy(),
        NUM_TOPK,
    )


@twin("vllm.v1.worker.gpu.metrics.logits", "_num_nans_kernel")
def num_nans(
    grid: tuple[int, ...],
    logits: torch.Tensor,
    logits_stride: int,
    num_nans: torch.Tensor,  # [T] int32, written
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """NaN logits per row."""
    num_nans[: grid[0]] = logits[: grid[0], :vocab_size].isnan().sum(dim=1)
