"""Selector walk kernel against its plain form: in the interpreter, or on a GPU."""

import dataclasses

import pytest
import torch

from forespark.serving.kernels.walk import walk_kernel
from forespark.serving.selector import WalkInputs, draft_noise, walk, walk_numba

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 50


def make(lengths, rank=6, width=5, padding=0, seed=0, dtype=torch.float32):
    """Inputs of a batch, with ``padding`` rows that belong to no draft."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    rows = int(lengths.sum()) + padding
    return WalkInputs(
        candidate_ids=torch.rand(rows, VOCAB, generator=rng).argsort(1)[:, :width].contiguous(),
        unary=torch.randn(rows, width, generator=rng),
        hidden=torch.randn(rows, rank, generator=rng),
        first=torch.cumsum(lengths, 0) - lengths,
        lengths=lengths,
        anchor=torch.randint(0, VOCAB, (len(lengths),), generator=rng),
        predecessor=torch.randn(VOCAB, rank, generator=rng).to(dtype),
        successor=torch.randn(VOCAB, rank, generator=rng).to(dtype),
        weight=torch.randn(rank, generator=rng),
        temperature=torch.tensor([0.0 if i % 2 else 1.3 for i in range(len(lengths))]),
    )


def linear_of(inputs):
    return torch.arange(len(inputs.candidate_ids), dtype=torch.float32) / 8


def run(inputs, seeds=None, position=None, bias=0.5):
    """(outputs, logits) of the kernel, on the CPU."""
    there = {
        field.name: value.to(DEVICE)
        for field in dataclasses.fields(inputs)
        if (value := getattr(inputs, field.name)) is not None
    }
    position = torch.zeros_like(inputs.lengths) if position is None else position
    out, logits = walk_kernel(
        WalkInputs(**there),
        linear_of(inputs).to(DEVICE),
        torch.tensor([bias], device=DEVICE),
        None if seeds is None else seeds.to(DEVICE),
        position.to(DEVICE),
    )
    parts = (out.tokens, out.scores, out.confidence, logits)
    return tuple(part.cpu() for part in parts)


def check(inputs, max_length, **arguments):
    tokens, scores, confidence, logits = run(inputs, **arguments)
    want = walk(inputs, max_length)
    assert torch.equal(tokens, want.tokens)
    # Same products in another order: float32 rounding of sums of a few terms.
    close = {"atol": 1e-5, "rtol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(scores, want.scores, **close)
    torch.testing.assert_close(confidence, want.confidence, **close)
    count = int(inputs.lengths.sum())
    expected = linear_of(inputs) + want.confidence + 0.5
    torch.testing.assert_close(logits[:count], expected[:count], **close)
    assert not logits[count:].any() and not tokens[count:].any()


@pytest.mark.parametrize("lengths", [[3], [1], [0, 2, 5], [1, 1, 0, 4], [0, 0], [0, 7, 0]])
@pytest.mark.parametrize("padding", [0, 3])
def test_ragged_drafts_equal_the_plain_form(lengths, padding):
    check(make(lengths, padding=padding), max(lengths))


@pytest.mark.parametrize(("rank", "width"), [(1, 1), (8, 16), (9, 17)])
def test_sizes_at_and_past_a_power_of_two(rank, width):
    check(make([2, 1], rank=rank, width=width), 2)


def test_half_precision_codebooks():
    check(make([3, 2], dtype=torch.bfloat16), 3)


def test_draws_are_those_of_the_cpu_path():
    inputs = make([0, 4, 6, 3, 5])
    seeds = torch.tensor([3, 2**40 + 17, 12345, 2**31, -5])
    position = torch.tensor([0, 5, 900, 77, 3])
    request = torch.repeat_interleave(torch.arange(5), inputs.lengths)
    step = torch.arange(18) - inputs.first[request]
    noise = draft_noise(seeds[request], position[request] + 1 + step, inputs.candidate_ids)
    tokens = run(inputs, seeds=seeds, position=position)[0]
    inputs.noise = noise
    assert torch.equal(tokens, walk(inputs, 6).tokens)
    inputs.noise = None
    assert not torch.equal(tokens, walk(inputs, 6).tokens), "the noise decided nothing"


def test_greedy_requests_ignore_seeds():
    inputs = make([3, 3])
    inputs.temperature.zero_()
    seeds, position = torch.tensor([1, 2]), torch.tensor([4, 4])
    assert torch.equal(run(inputs, seeds=seeds, position=position)[0], walk(inputs, 3).tokens)


def test_ties_go_to_the_first_candidate():
    inputs = make([2, 2])
    inputs.unary.zero_()
    inputs.successor.zero_()
    check(inputs, 2)
    assert torch.equal(run(inputs)[0], inputs.candidate_ids[:, 0])


def test_nan_and_infinite_scores():
    nan, inf = float("nan"), float("inf")
    inputs = make([6])
    inputs.unary[0, 1] = nan
    inputs.unary[1, 2] = inf
    inputs.unary[2, :4] = -inf
    inputs.unary[3] = -inf
    inputs.unary[4, 1:] = nan
    inputs.hidden[5] = nan
    check(inputs, 6)
    tokens = run(inputs)[0]
    assert torch.equal(tokens, walk_numba(inputs).tokens)
    ids = inputs.candidate_ids
    assert tokens[1] == ids[1, 2] and tokens[2] == ids[2, 4]
    assert [tokens[row] == ids[row, 0] for row in (3, 4, 5)] == [True] * 3


def test_a_nan_stays_in_its_own_draft():
    inputs = make([2, 2], padding=2)
    want = run(inputs)
    inputs.hidden[:2] = float("nan")
    inputs.hidden[4:] = float("nan")
    for got, before in zip(run(inputs), want, strict=True):
        assert torch.equal(got[2:4], before[2:4])
