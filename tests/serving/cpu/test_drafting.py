"""Drafting twins against vLLM's kernels; the selector walk against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_twins import beside
from numba import njit

from forespark.serving.cpu import philox, registry

DFLASH = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"
DFLASH2 = "vllm.v1.worker.gpu.spec_decode.dflash2.speculator"
SLOTS, MASK, BLOCK = 6, 999, 4


def _inputs(
    lengths: list[int],  # target tokens of each request this step
    rejected: list[int],
    sampled: list[int],  # 0: still prefilling
    positions: list[int],  # position of each request's first target token
    from_anchor: bool,
    steps: int = 3,
    cp: tuple[int, int, int] = (0, 1, 1),
    max_model_len: int = 64,
) -> tuple:
    """Grid and arguments of the kernel, every output prefilled with what must not survive."""
    rng = torch.Generator().manual_seed(0)
    num_reqs, tokens = len(lengths), sum(lengths)
    queries = steps + (0 if from_anchor else 1)
    max_reqs, max_tokens = SLOTS, 40
    table = torch.randint(1, 50, (SLOTS, 8), generator=rng, dtype=torch.int32)
    table[0, 0] = 0  # an evicted block: nothing may be written there
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    target_positions = torch.cat(
        [torch.arange(p, p + n) for p, n in zip(positions, lengths, strict=True)]
    )
    samples = max_reqs * steps
    width = max(lengths) + queries
    lanes = min(256, 1 << (width - 1).bit_length())
    outputs = (
        torch.full((max_tokens,), -7, dtype=torch.int32),
        torch.full((max_tokens,), -7),
        torch.full((max_reqs + 1,), -7, dtype=torch.int32),
        torch.full((max_reqs,), -7, dtype=torch.int32),
        torch.full((2, max_tokens), -7)[1],  # one row of a matrix: an offset view
        torch.full((max_tokens,), -7),
        torch.full((max_tokens,), -7),
        torch.full((samples,), -7),
        torch.full((samples,), -7),
        torch.full((samples,), -7, dtype=torch.int32),
        torch.full((SLOTS,), -7.0),
        torch.full((SLOTS,), -7),
    )
    slots = torch.tensor([3, 0, 5, 1, 4][:num_reqs], dtype=torch.int32)
    scalars = (MASK, BLOCK, queries, steps, max_reqs, max_tokens, max_model_len, cp[0])
    args = (
        *outputs,
        target_positions,
        starts,
        slots,
        torch.arange(SLOTS)[:, None] + 500,
        torch.arange(SLOTS, dtype=torch.int32) + 700,
        torch.tensor(sampled, dtype=torch.int32),
        torch.tensor(rejected, dtype=torch.int32),
        torch.linspace(0, 1, SLOTS),
        torch.arange(SLOTS) * 11,
        table,
        table.stride(0),
        *scalars,
    )
    constants = {
        "SAMPLE_FROM_ANCHOR": from_anchor,
        "PAD_SLOT_ID": -1,
        "CP_SIZE": cp[1],
        "CP_INTERLEAVE": cp[2],
        "BLOCK_SIZE": lanes,
    }
    assert tokens <= max_tokens
    return (num_reqs, -(-width // lanes)), args, constants


CASES = {
    "decode, ragged": ([4, 1, 3], [2, 0, 0], [2, 1, 3], [9, 0, 21]),
    "all refused": ([4, 4], [3, 3], [1, 1], [5, 6]),
    "chunked prefill beside decode": ([4, 11], [1, 0], [3, 0], [12, 8]),
    "prefill only": ([9], [0], [0], [0]),
    "end of the context": ([2, 1], [0, 0], [2, 1], [60, 63]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("from_anchor", [False, True], ids=["anchor is bonus", "anchor predicts"])
def test_prepare_dflash_inputs(case, from_anchor):
    grid, args, constants = _inputs(*case, from_anchor)
    with beside(DFLASH, "_prepare_dflash_inputs_kernel") as pairs:
        pairs["_prepare_dflash_inputs_kernel"][grid](*args, **constants)


@pytest.mark.parametrize("rank", [0, 1])
def test_prepare_dflash_inputs_under_context_parallelism(rank):
    case = CASES["chunked prefill beside decode"]
    grid, args, constants = _inputs(*case, False, cp=(rank, 2, 2))
    with beside(DFLASH, "_prepare_dflash_inputs_kernel") as pairs:
        pairs["_prepare_dflash_inputs_kernel"][grid](*args, **constants)


@njit
def _noise(key, token):
    return philox.gumbel32(key, token)


def _walk_by_definition(scores, candidates, positions, states, temperature, seeds, probabilistic):
    """Tokens and scores along each path, written from the selector's documentation."""
    num_reqs, steps, top_k = candidates.shape
    tokens = torch.full((num_reqs, steps), -7)
    realized = torch.full((num_reqs, steps, top_k), -7.0)
    for r in range(num_reqs):
        state = int(states[r * steps])
        if state < 0:
            continue
        previous = 0
        for step in range(steps):
            row = scores[r, step, previous].clone()
            realized[r, step] = row
            t = float(temperature[state]) if probabilistic else 0.0
            if t > 0:
                position = int(positions[r * steps + step]) - 1
                key = philox.gumbel_key(int(seeds[state]), position, True)
                row = row / t + torch.tensor([_noise(key, int(c)) for c in candidates[r, step]])
            previous = int(row.argmax())
            tokens[r, step] = candidates[r, step, previous]
    return tokens, realized


def _selector(num_reqs: int, steps: int, top_k: int, vocabulary: int = 50):
    rng = torch.Generator().manual_seed(1)
    scores = torch.randn(num_reqs, steps, top_k, top_k, generator=rng)
    candidates = torch.stack(
        [torch.randperm(vocabulary, generator=rng)[:top_k] for _ in range(num_reqs * steps)]
    ).view(num_reqs, steps, top_k)
    states = torch.tensor([4, 0, -1, 2][:num_reqs], dtype=torch.int32).repeat_interleave(steps)
    return scores, candidates, torch.arange(num_reqs * steps) + 30, states


def _selector_arguments(num_reqs: int) -> tuple:
    steps, top_k = 3, 5
    scores, candidates, positions, states = _selector(num_reqs, steps, top_k)
    scores[0, 0, 0] = 1.5  # ties: the first, unless noise decides
    temperature, seeds = torch.tensor([0.0, 1, 1, 1, 0.8, 1]), torch.arange(SLOTS) + 77
    outputs = torch.full((6, steps), -7), torch.full((6, steps, top_k), -7.0)
    return scores, candidates, positions, states, temperature, seeds, *outputs


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("probabilistic", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 4])
def test_selector_walk(probabilistic, num_reqs, fp64):
    arguments = _selector_arguments(num_reqs)
    arguments[0][0, 1, :, 2] = float("nan")  # never chosen
    with beside(DFLASH2, "_selector_walk_kernel") as pairs:
        pairs["_selector_walk_kernel"][(num_reqs,)](
            *arguments, num_steps=3, top_k=5, BLOCK_K=8, SAMPLE_PROBABILISTIC=probabilistic,
            USE_FP64=fp64, num_warps=1,
        )  # fmt: skip


@pytest.mark.parametrize("probabilistic", [False, True])
def test_selector_walk_by_its_definition(probabilistic):
    *inputs, tokens, realized = _selector_arguments(4)
    registry.load()[DFLASH2, "_selector_walk_kernel"][(4,)](
        *inputs, tokens, realized, num_steps=3, top_k=5, BLOCK_K=8,
        SAMPLE_PROBABILISTIC=probabilistic, USE_FP64=False,
    )  # fmt: skip
    expected_tokens, expected_realized = _walk_by_definition(*inputs, probabilistic)
    torch.testing.assert_close(tokens[:4], expected_tokens)
    torch.testing.assert_close(realized[:4], expected_realized)


@pytest.mark.parametrize("fp64", [False, True])
def test_selector_draws_from_its_own_softmax(fp64):
    """3,000 one-step drafts with their own seeds against softmax(scores / T), T = 0.7.

    Chi-square with 3 degrees of freedom: 21.1 is its 99.99 % point.
    """
    draws, top_k = 3000, 4
    scores = torch.tensor([0.3, -0.5, 1.0, 0.0]).repeat(draws, 1, top_k, 1)
    candidates = torch.tensor([7, 3, 20, 11]).repeat(draws, 1, 1)
    tokens = torch.zeros(draws, 1, dtype=torch.int64)
    registry.load()[DFLASH2, "_selector_walk_kernel"][(draws,)](
        scores, candidates, torch.full((draws,), 12), torch.arange(draws, dtype=torch.int32),
        torch.full((draws,), 0.7), torch.arange(draws), tokens, torch.zeros(draws, 1, top_k),
        num_steps=1, top_k=top_k, BLOCK_K=4, SAMPLE_PROBABILISTIC=True, USE_FP64=fp64,
    )  # fmt: skip
    expected = draws * torch.softmax(scores[0, 0, 0] / 0.7, -1)
    counts = torch.stack([(tokens == c).sum() for c in (7, 3, 20, 11)])
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.1


def test_cache_draft_logits():
    """The previous candidates leave the cache, the new ones enter; padding writes nothing."""
    steps, top_k, vocabulary = 3, 5, 50
    scores, candidates, _, states = _selector(4, steps, top_k)
    draft_logits = torch.full((SLOTS, steps, vocabulary + 2), -float("inf"))[:, :, :vocabulary]
    cached = torch.zeros(SLOTS, steps, top_k, dtype=torch.int64)
    with beside(DFLASH2, "_cache_draft_logits_kernel") as pairs:
        for shift in (0, 1):  # the second step overwrites the first one's columns
            pairs["_cache_draft_logits_kernel"][(4 * steps,)](
                draft_logits, cached, (candidates + shift) % vocabulary, scores[:, :, 0].clone(),
                states, draft_logits.stride(0), draft_logits.stride(1),
                num_steps=steps, top_k=top_k, BLOCK_K=8, num_warps=1,
            )  # fmt: skip
    finite = torch.isfinite(draft_logits).sum(-1)
    assert finite[[4, 0, 2]].tolist() == [[top_k] * steps] * 3
    assert finite[[1, 3, 5]].sum() == 0
