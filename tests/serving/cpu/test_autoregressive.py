"""Twins of autoregressive drafting against vLLM's kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_twins import beside

MODULE = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator"
SLOTS, K, HIDDEN = 6, 3, 5


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("lengths", "rejected", "sampled"),
    [([4, 1, 3], [2, 0, 0], [2, 1, 3]), ([4, 7], [3, 0], [1, 0]), ([5], [0], [0])],
    ids=["ragged decode", "chunked prefill beside decode", "prefill only"],
)
def test_prepare_prefill_inputs(lengths, rejected, sampled):
    num_reqs, tokens = len(lengths), sum(lengths)
    stale = {"dtype": torch.int32, "fill_value": -7}
    with beside(MODULE, "_prepare_prefill_inputs_kernel") as pairs:
        pairs["_prepare_prefill_inputs_kernel"][(num_reqs,)](
            torch.full((SLOTS,), -7), torch.full((), 2), torch.full((20,), **stale),
            torch.full((20,), -7), torch.full((SLOTS + 1,), **stale),
            torch.full((SLOTS,), **stale), torch.arange(tokens, dtype=torch.int32) + 100,
            torch.arange(tokens) + 30, ints(3, 0, 5)[:num_reqs],
            torch.arange(SLOTS)[:, None] + 500, torch.arange(SLOTS, dtype=torch.int32) + 700,
            ints(*sampled), ints(*rejected), ints(0, *np.cumsum(lengths)), ints(9, 8, 7)[:num_reqs],
            SLOTS, BLOCK_SIZE=4,
        )  # fmt: skip


@pytest.mark.parametrize("advance", [True, False])
def test_prepare_decode_inputs(advance):
    tokens = torch.arange(12).view(4, 3)[:3]
    with beside(MODULE, "_prepare_decode_inputs_kernel") as pairs:
        pairs["_prepare_decode_inputs_kernel"][(4,)](
            tokens, tokens.stride(0), ints(20, 64, 9), ints(2, 0, 1),
            torch.full((SLOTS,), -7, dtype=torch.int32), torch.tensor([17, 63, 7, -7]),
            torch.arange(4), torch.full((SLOTS + 1,), -7, dtype=torch.int32),
            torch.full((SLOTS,), -7, dtype=torch.int32), 64, SLOTS,
            BLOCK_SIZE=4, ADVANCE_DRAFT_POSITIONS=advance,
        )  # fmt: skip


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("step", [0, 1, K - 1])
def test_update_draft_inputs(advance, step):
    out, hidden = torch.full((SLOTS, K), -7), torch.randn(4, HIDDEN + 2)[:, :HIDDEN]
    following = torch.full((SLOTS, HIDDEN), -7.0)
    with beside(MODULE, "_update_draft_inputs_kernel") as pairs:
        pairs["_update_draft_inputs_kernel"][(3,)](
            out, out.stride(0), following, following.stride(0),
            torch.full((SLOTS,), -7, dtype=torch.int32), torch.tensor([17, 63, 7, -7]),
            torch.arange(4), ints(18, 64, 8, -7), torch.tensor([41, 42, 43]),
            torch.tensor(step), hidden, hidden.stride(0), HIDDEN, 64, K,
            BLOCK_SIZE=4, ADVANCE_DRAFT_POSITIONS=advance,
        )  # fmt: skip
