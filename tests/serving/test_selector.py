"""Selector walk: the plain form, its compiled twin, and vLLM's walk over equal blocks."""

import pytest
import torch

from forespark.serving.selector import WalkInputs, draft_noise, walk, walk_numba

VOCAB, RANK, WIDTH = 50, 6, 5


def make(lengths, seed=0, hot=False):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    rows = int(lengths.sum())
    ids = torch.rand(rows, VOCAB, generator=rng).argsort(1)[:, :WIDTH].contiguous()
    seeds = torch.arange(rows)
    return WalkInputs(
        candidate_ids=ids,
        unary=torch.randn(rows, WIDTH, generator=rng),
        hidden=torch.randn(rows, RANK, generator=rng),
        first=torch.cumsum(lengths, 0) - lengths,
        lengths=lengths,
        anchor=torch.randint(0, VOCAB, (len(lengths),), generator=rng),
        predecessor=torch.randn(VOCAB, RANK, generator=rng),
        successor=torch.randn(VOCAB, RANK, generator=rng),
        weight=torch.randn(RANK, generator=rng),
        temperature=torch.tensor([0.0 if i % 2 else 1.3 for i in range(len(lengths))]),
        noise=draft_noise(seeds, seeds + 7, ids) if hot else None,
    )


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("lengths", [[3], [0, 2, 5], [1, 1, 0, 4], [0]])
def test_twin_matches(lengths, hot):
    inputs = make(lengths, hot=hot)
    plain, fast = walk(inputs, max(lengths)), walk_numba(inputs)
    assert torch.equal(plain.tokens, fast.tokens)
    # Same products in another order: float32 rounding of sums of six terms.
    torch.testing.assert_close(plain.scores, fast.scores, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain.confidence, fast.confidence, atol=1e-5, rtol=1e-5)


def test_equal_blocks_choose_what_vllm_scores():
    vllm = pytest.importorskip("vllm.model_executor.models.qwen3_dflash2")
    inputs = make([4, 4, 4])
    edges = vllm._score_edges(
        inputs.predecessor,
        inputs.successor,
        inputs.candidate_ids.view(3, 4, WIDTH),
        inputs.unary.view(3, 4, WIDTH),
        inputs.hidden.view(3, 4, RANK),
        inputs.anchor,
        WIDTH,
    )
    out = walk(inputs, 4)
    for request in range(3):
        previous = 0
        for step in range(4):
            row = request * 4 + step
            scores = edges[request, step, previous]
            torch.testing.assert_close(out.scores[row], scores, atol=1e-5, rtol=1e-5)
            previous = int(scores.argmax())
            assert out.tokens[row] == inputs.candidate_ids[row, previous]


def test_noise_is_a_function_of_seed_position_and_token():
    ids = torch.tensor([[3, 9], [9, 3]])
    same = draft_noise(torch.tensor([5, 5]), torch.tensor([2, 2]), ids)
    assert same[0, 0] == same[1, 1] and same[0, 1] == same[1, 0]
    moved = draft_noise(torch.tensor([5, 6]), torch.tensor([3, 2]), ids)
    assert not torch.equal(same, moved)
