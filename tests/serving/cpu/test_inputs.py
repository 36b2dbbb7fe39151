"""Batch-building and state-update twins against vLLM's kernels.

Batches are ragged decodes with drafts, chunked prefills beside decodes, single requests,
and empty batches; buffers are always longer than the batch.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from kernel_twins import beside
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.sample import prompt_logprob

MODULE = "vllm.v1.worker.gpu.input_batch"
SLOTS, LENGTH, K = 6, 40, 3

# Per request: (slot, tokens computed before, prompt length, scheduled tokens, drafts).
BATCHES = {
    "ragged decode": [(4, 12, 10, 4, 3), (0, 9, 9, 1, 0), (2, 20, 7, 3, 2)],
    "chunked prefill": [(1, 0, 30, 8, 0), (3, 8, 30, 22, 0), (5, 14, 11, 2, 1)],
    "last prompt token": [(2, 9, 10, 1, 0)],
    "resumed inside the prompt": [(0, 5, 12, 9, 2)],
    "empty": [],
}


def ints(values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype)


@pytest.fixture(params=list(BATCHES.values()), ids=list(BATCHES))
def batch(request) -> dict[str, torch.Tensor]:
    rows = request.param
    rng = torch.Generator().manual_seed(3)
    computed, prefill = torch.zeros(2, SLOTS, dtype=torch.int32)
    for slot, done, length, _, _ in rows:
        computed[slot], prefill[slot] = done, length
    scheduled = [row[3] for row in rows]
    starts = ints([0, *accumulate(scheduled)])
    return {
        "index": ints(row[0] for row in rows),
        "starts": torch.cat([starts, starts[-1].expand(2)]),
        "computed": computed,
        "prefill": prefill,
        "seq_lens": torch.cat([ints(row[1] + row[3] for row in rows), ints([0, 0])]),
        "cu_logits": ints([0, *accumulate(row[4] + 1 for row in rows)]),
        "tokens": torch.randint(0, 90, (SLOTS, LENGTH), generator=rng, dtype=torch.int32),
        "total": ints([max(done + 1, length) for _, done, length, _, _ in rows]),
        "num_tokens": sum(scheduled),
    }


def test_prefill_inputs(batch):
    with beside(MODULE, "_prepare_prefill_inputs_kernel"):
        for lookahead in (1, 3):
            input_batch.prepare_prefill_inputs(
                torch.full((50,), -7, dtype=torch.int32),
                torch.full((lookahead, SLOTS), -7, dtype=torch.int32),
                batch["index"],
                batch["starts"],
                batch["tokens"],
                batch["prefill"],
                batch["computed"],
            )


def test_positions_and_lengths(batch):
    with beside(MODULE, "_prepare_pos_seq_lens_kernel"):
        input_batch.prepare_pos_seq_lens(
            batch["index"],
            batch["starts"],
            batch["computed"],
            torch.full((50,), -7, dtype=torch.int64),
            torch.full((SLOTS,), 9, dtype=torch.int32),
        )


@pytest.mark.parametrize("num_new", [1, 0])
def test_sampled_and_draft_tokens(batch, num_new):
    cu_logits = batch["cu_logits"] - (1 - num_new) * torch.arange(len(batch["cu_logits"])).int()
    with beside(MODULE, "_combine_sampled_and_draft_tokens_kernel"):
        input_batch.combine_sampled_and_draft_tokens(
            torch.full((50,), -7, dtype=torch.int32),
            batch["index"],
            torch.arange(100, 100 + SLOTS).view(SLOTS, 1),
            batch["starts"],
            batch["seq_lens"],
            batch["prefill"],
            torch.arange(SLOTS * K).view(SLOTS, K),
            cu_logits,
            int(cu_logits[-1]),
            num_new,
        )


def test_sampled_and_rejected_counts(batch):
    num_reqs = len(batch["index"])
    with beside(MODULE, "_get_num_sampled_and_rejected_kernel"):
        input_batch.get_num_sampled_and_rejected(
            torch.ones(num_reqs, dtype=torch.int32),
            batch["seq_lens"],
            batch["cu_logits"],
            batch["index"],
            batch["prefill"],
        )


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("queried", [True, False])
def test_post_update(batch, counted, queried):
    num_reqs = len(batch["index"])
    index = batch["index"].clone()
    if num_reqs > 1:
        index[1] = -1  # a finished row
    total = torch.full((SLOTS,), 20, dtype=torch.int32)
    sampled = torch.arange(num_reqs * (K + 1)).view(num_reqs, K + 1) % 5
    logits = batch["cu_logits"].diff()
    num_sampled = torch.minimum(logits, ints(range(num_reqs)))
    with beside(MODULE, "_post_update_kernel"):
        input_batch.post_update(
            index,
            batch["computed"],
            torch.zeros(SLOTS, 1, dtype=torch.int64),
            torch.ones(SLOTS, 90, dtype=torch.int32) if counted else None,
            sampled,
            num_sampled,
            logits - num_sampled,
            batch["starts"] if queried else None,
            batch["tokens"],
            total,
        )


def test_computed_lengths(batch):
    with beside(MODULE, "_post_update_num_computed_tokens_kernel"):
        input_batch.post_update_num_computed_tokens(
            batch["index"], batch["computed"], batch["starts"]
        )


def test_expanded_mapping(batch):
    with beside(MODULE, "_expand_idx_mapping_kernel"):
        cu_logits = batch["cu_logits"]
        input_batch.expand_idx_mapping(batch["index"], int(cu_logits[-1]), cu_logits, K + 1)


def test_prompt_logprob_targets(batch):
    with beside(prompt_logprob.__name__, "_prompt_logprobs_token_ids_kernel"):
        prompt_logprob.get_prompt_logprobs_token_ids(
            batch["num_tokens"],
            batch["starts"],
            batch["index"],
            batch["computed"],
            batch["tokens"],
        )
