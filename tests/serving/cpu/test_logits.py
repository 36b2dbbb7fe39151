"""Twins of logit processing, log-probabilities and grammar masks against vLLM's kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernel_twins import beside
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.metrics import logits as metrics
from vllm.v1.worker.gpu.sample import bad_words, logit_bias, logprob, min_p, penalties

ROWS, SLOTS, VOCABULARY = 5, 4, 70
INDEX = torch.tensor([2, 2, 2, 0, 3], dtype=torch.int32)
LOCAL = torch.tensor([0, 1, 2, 0, 0], dtype=torch.int32)  # request 2 verifies two drafts
INPUTS = torch.tensor([7, 9, 9, 11, 65], dtype=torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def logits() -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return 3 * torch.randn(ROWS, VOCABULARY + 5, generator=rng)[:, :VOCABULARY]


@pytest.fixture
def history() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    return {
        "ids": torch.randint(0, VOCABULARY, (SLOTS, 30), generator=rng, dtype=torch.int32),
        "prompt": ints(10, 4, 12, 5),
        "prefill": ints(14, 4, 12, 9),
        "total": ints(14, 4, 20, 9),
    }


def test_penalties(logits, history):
    mask = torch.zeros(SLOTS, 3, dtype=torch.int32)
    counts = torch.zeros(SLOTS, VOCABULARY, dtype=torch.int32)
    with beside(penalties.__name__, "_bincount_kernel", "_penalties_kernel"):
        penalties.bincount(
            ints(2, 0, 3), history["ids"], history["prompt"], history["prefill"], mask, counts, 14
        )
        penalties.apply_penalties(
            logits,
            INDEX,
            INPUTS,
            LOCAL,
            torch.tensor([1.0, 1.0, 1.3, 1.0]),
            torch.tensor([0.4, 0.0, 0.2, 0.0]),
            torch.tensor([0.0, 0.0, 0.7, 0.0]),
            mask,
            counts,
        )


def test_min_p(logits):
    with beside(min_p.__name__, "_min_p_kernel"):
        min_p.apply_min_p(logits, INDEX, torch.tensor([0.1, 0.0, 0.5, 0.0]))


def test_bad_words(logits, history):
    ids = history["ids"]
    ids[2, 18:20] = ints(5, 6)  # the newest committed tokens of request 2
    words = torch.zeros(SLOTS, 10, dtype=torch.int32)
    # A lone token; two committed tokens; one committed and one draft; two drafts.
    words[2, :10] = ints(33, 5, 6, 40, 6, 9, 41, 9, 9, 42)
    words[0, :2] = ints(12, 13)
    offsets = torch.zeros(SLOTS, 6, dtype=torch.int32)
    offsets[2, :5] = ints(0, 1, 4, 7, 10)
    offsets[0, :2] = ints(0, 2)
    with beside(bad_words.__name__, "_bad_words_kernel"):
        bad_words.apply_bad_words(
            logits,
            INDEX,
            words,
            offsets,
            ints(1, 0, 4, 0),
            ids,
            history["prompt"],
            history["total"],
            INPUTS,
            LOCAL,
            4,
        )
    assert logits[0, 33] == logits[0, 40] == logits[1, 41] == logits[2, 42] == -float("inf")
    assert logits[1, 40] > -float("inf")


@pytest.mark.parametrize("check_rows", [False, True])
def test_bias(logits, check_rows):
    logits[4, 1:] = -float("inf")  # the grammar allows token 0 only, which is a stop token
    with beside(logit_bias.__name__, "_bias_kernel"):
        logit_bias.apply_logit_bias(
            logits,
            INDEX,
            torch.tensor([3, 4, 5, 8, 2]),
            ints(0, 0, 0, 0).index_fill(0, torch.tensor([0]), 3),
            ints(*range(16)).view(SLOTS, 4),
            ints(2, 0, 2, 0),
            ints(*range(4, 20)).view(SLOTS, 4),
            torch.arange(16.0).view(SLOTS, 4),
            ints(0, 0, 6, 9),
            ints(0, 0, 2, 1),
            ints(0, 0, 0, 1),
            ints(0, 0, 0, 0, 3, 9, 0, 0).view(SLOTS, 2),
            check_rows,
        )
    assert (logits[4, 0] > -float("inf")) == check_rows


@pytest.mark.parametrize("custom", [False, True])
def test_logprobs(logits, custom):
    state = SimpleNamespace(
        num_token_ids=SimpleNamespace(gpu=ints(0, 0, 3, 0)),
        token_ids=SimpleNamespace(gpu=ints(*range(16)).view(SLOTS, 4)),
    )
    kernels = ["_topk_log_softmax_kernel", "_ranks_kernel"]
    with beside(logprob.__name__, *kernels, "_fill_logprob_token_ids_kernel"):
        for wanted in (0, 2):
            logprob.compute_topk_scores(
                logits,
                wanted,
                torch.tensor([3, 0, 69, 8, 1]),
                logprob_token_ids_state=state,
                expanded_idx_mapping=INDEX,
                max_per_req_token_ids=3 if custom else 0,
            )


def test_nan_count(logits):
    logits[1, 3:6] = float("nan")
    assert metrics._num_nans_kernel is not None
    from forespark.serving.cpu.logprobs import num_nans

    counted = torch.zeros(ROWS, dtype=torch.int32)
    num_nans((ROWS,), logits, logits.stride(0), counted, VOCABULARY, BLOCK_SIZE=8192)
    assert counted.tolist() == [0, 3, 0, 0, 0]


def test_grammar_mask(logits):
    """Three requests with 3, 1 and 1 rows; the second mask of request 1 was trimmed away."""
    rng = torch.Generator().manual_seed(4)
    shape = (4, (VOCABULARY + 31) // 32)
    masks = torch.randint(-(1 << 31), 1 << 31, shape, generator=rng, dtype=torch.int64).int()
    with beside(structured_outputs.__name__, "_apply_grammar_bitmask_kernel") as pairs:
        pairs["_apply_grammar_bitmask_kernel"][(4, 1)](
            logits,
            logits.stride(0),
            ints(0, 2, 8, 9),
            ints(0, 3, 3, 4, 5),
            masks,
            masks.stride(0),
            VOCABULARY,
            MASK_STRIDE=4,
            BLOCK_SIZE=8192,
        )
    assert torch.isfinite(logits[1]).all()
