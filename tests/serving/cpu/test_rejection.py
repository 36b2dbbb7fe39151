"""Rejection sampling twins against vLLM's kernels, and against the distribution they owe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_twins import SideBySide, beside, twins_only

UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
STANDARD = (
    "_compute_local_logits_stats_kernel",
    "_rejection_kernel",
    "_resample_kernel",
    "_insert_resampled_kernel",
)
BLOCK = (*STANDARD, "_compute_cumulative_log_p_kernel", "_compute_local_residual_mass_kernel")
K = 4  # draft length
SLOTS = 9


def batch(
    drafted: list[int],  # drafts of each request
    temperatures: list[float],  # of each request
    vocabulary: int,
    probabilistic: bool,
    seed: int = 0,
    sharpness: float = 1.0,
) -> dict:
    """Arguments of ``rejection_sample`` for requests in scattered slots.

    Drafts follow the target's argmax or its likeliest tokens often enough that requests are
    refused at different steps. Buffers are longer than the batch, as vLLM's are.
    """
    rng = torch.Generator().manual_seed(seed)
    num_reqs = len(drafted)
    slots = torch.randperm(SLOTS, generator=rng)[:num_reqs].to(torch.int32)
    rows = [d + 1 for d in drafted]
    cu = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    num_rows = int(cu[-1])
    # Rows are wider than the vocabulary, so strides differ from sizes.
    target = sharpness * torch.randn(num_rows, vocabulary + 3, generator=rng)[:, :vocabulary]
    draft_logits = torch.full((SLOTS, K, vocabulary), -float("inf"))
    drafts = torch.zeros(num_rows + 1, dtype=torch.int32)
    drafts[-1] = -1  # read by a kernel one past the last row
    temperature = torch.ones(SLOTS)
    temperature[slots.long()] = torch.tensor(temperatures, dtype=torch.float32)
    for r in range(num_reqs):
        for step in range(drafted[r]):
            row = int(cu[r]) + step
            near = target[row] + 0.7 * torch.randn(vocabulary, generator=rng)
            top = near.topk(min(6, vocabulary)).indices
            draft_logits[slots[r], step, top] = near[top] * max(temperatures[r], 1.0)
            drafts[row + 1] = top[0]
    return {
        "target_logits": target,
        "draft_logits": draft_logits if probabilistic else None,
        "draft_sampled": drafts[:num_rows],
        "cu_num_logits": cu,
        "pos": torch.arange(num_rows, dtype=torch.int64) + 100,
        "idx_mapping": slots,
        "expanded_idx_mapping": slots.repeat_interleave(torch.tensor(rows)),
        "expanded_local_pos": torch.cat([torch.arange(n, dtype=torch.int32) for n in rows]),
        "temperature": temperature,
        "seed": torch.arange(SLOTS, dtype=torch.int64) * 2**33 + seed,
        "num_speculative_steps": K,
    }


def compare(arguments: dict, kernels: tuple[str, ...] = STANDARD) -> tuple[torch.Tensor, ...]:
    """Run one rejection sampling with every launch compared; all kernels must have run."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    with beside(UTILS, *kernels) as pairs:
        result = rejection_sample(**arguments)
    idle = [name for name, pair in pairs.items() if not pair.launches]
    expected_idle = (
        ["_compute_local_residual_mass_kernel"]
        if kernels is BLOCK and arguments["draft_logits"] is None
        else []
    )
    assert idle == expected_idle
    return result


RAGGED = {
    "full": [4, 4, 4],
    "ragged": [4, 0, 2, 1, 3],
    "one without drafts": [0, 4],
    "none with drafts": [0, 0, 0],
    "single": [2],
}


@pytest.mark.parametrize("drafted", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("probabilistic", [False, True], ids=["certain", "probabilistic"])
@pytest.mark.parametrize("mix", ["greedy", "sampled", "mixed"])
def test_standard_method(drafted, probabilistic, mix):
    choices = {"greedy": [0.0], "sampled": [1.0, 0.6], "mixed": [0.0, 1.0, 0.0, 0.7, 1.3]}[mix]
    temperatures = [choices[i % len(choices)] for i in range(len(drafted))]
    for seed in range(2):
        compare(batch(drafted, temperatures, 40, probabilistic, seed, sharpness=3.0))


def test_several_vocabulary_blocks_with_odd_tails():
    """9,001 tokens: two blocks of logit statistics, nine of resampling, both with a tail."""
    compare(batch([3, 1, 2], [0.0, 1.0, 0.8], 9001, True, sharpness=2.0))


@pytest.mark.parametrize("method", ["block", "synthetic"])
@pytest.mark.parametrize("probabilistic", [False, True], ids=["certain", "probabilistic"])
def test_other_methods(method, probabilistic):
    for seed in range(3):
        arguments = batch([4, 0, 2, 3], [1.0, 0.7, 0.0, 1.0], 40, probabilistic, seed, 3.0)
        if method == "block":
            compare({**arguments, "use_block_verification": True}, BLOCK)
        else:
            rates = torch.tensor([0.9, 0.5, 0.5, 0.1])
            compare({**arguments, "synthetic_conditional_rates": rates})


def test_double_precision_noise():
    compare({**batch([2, 1], [1.0, 0.0], 40, True), "use_fp64": True})


def test_half_precision_draft_logits():
    arguments = batch([3, 2], [1.0, 0.5], 40, True)
    arguments["draft_logits"] = arguments["draft_logits"].to(torch.bfloat16)
    # The interpreter computes in the cache's own type only after the cast, as the twin does.
    compare(arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("probabilistic", [False, True], ids=["certain", "probabilistic"])
def test_placeholder_drafts_are_refused(temperature, probabilistic):
    arguments = batch([4, 3], [temperature, temperature], 40, probabilistic, sharpness=3.0)
    arguments["draft_sampled"][3] = -1
    arguments["draft_sampled"][6] = -1
    sampled, counts = compare(arguments)
    assert counts[0] <= 3
    assert counts[1] == 1
    assert (sampled[1, 0] >= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_logits(temperature):
    """-inf logits (a grammar, a minimum length) can neither be kept nor drawn."""
    arguments = batch([3, 2], [temperature] * 2, 40, True, sharpness=3.0)
    arguments["target_logits"][:, 10:] = -float("inf")
    sampled, counts = compare(arguments)
    for r in range(2):
        assert (sampled[r, : counts[r]] < 10).all()


def test_nan_logits_do_not_win_and_stay_in_range():
    """A NaN is stepped over by maxima; one in a sampled row refuses the draft."""
    arguments = batch([3, 2], [0.0, 1.0], 40, False, sharpness=3.0)
    arguments["target_logits"][:, 5] = float("nan")
    sampled, counts = compare(arguments)
    assert counts[1] == 1
    for r in range(2):
        assert ((sampled[r, : counts[r]] >= 0) & (sampled[r, : counts[r]] < 40)).all()


def test_rows_of_nothing_but_nan():
    """The interpreter cannot reduce these; the twins must stay in range all the same."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    arguments = batch([3, 2], [0.0, 1.0], 40, True)
    arguments["target_logits"][:] = float("nan")
    with twins_only(UTILS, *STANDARD):
        sampled, counts = rejection_sample(**arguments)
    assert counts.tolist() == [1, 1]
    assert sampled[:, 0].tolist() == [0, 0]


def test_flatten_sampled():
    module = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
    with beside(module, "_flatten_sampled_kernel") as pairs:
        pair: SideBySide = pairs["_flatten_sampled_kernel"]
        sampled = torch.arange(15).view(3, 5)
        counts = torch.tensor([2, 1, 4], dtype=torch.int32)
        cu = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
        pair[(3,)](torch.zeros(9, dtype=torch.int64), sampled, 5, counts, cu, num_warps=1)
        assert pair.launches == 1


# ---- the distribution ---------------------------------------------------------------------

# 99.99 % points of chi-square with 4 and 24 degrees of freedom: five tokens, pairs of them.
CHI2_4, CHI2_24 = 23.5, 60.0


def _chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("probabilistic", [False, True], ids=["certain", "probabilistic"])
def test_the_target_distribution_is_kept(method, probabilistic):
    """Five tokens, two drafts, 4,000 requests with their own seeds at temperature 0.8.

    The first token must follow the target's first row. The first two of requests that
    emitted two or more must factor, given the first, into the target's rows; here the
    target's second row is the same whatever the first token was, so pairs are a product.
    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    requests, steps, vocabulary, temperature = 4000, 2, 5, 0.8
    rng = torch.Generator().manual_seed(3)
    processed = torch.randn(3, vocabulary, generator=rng) / temperature
    proposal = torch.randn(2, vocabulary, generator=rng)  # cached before temperature
    q = torch.softmax(proposal / temperature, -1)
    drafted = torch.multinomial(q, requests, replacement=True, generator=rng).T  # [R, 2]
    if not probabilistic:
        drafted = processed[:2].argmax(-1).expand(requests, 2)
    draft_sampled = torch.zeros(requests, 3, dtype=torch.int32)
    draft_sampled[:, 1:] = drafted
    slots = torch.arange(requests, dtype=torch.int32)
    with twins_only(UTILS, *BLOCK):
        sampled, counts = rejection_sample(
            processed.repeat(requests, 1),
            proposal.expand(requests, -1, -1).contiguous() if probabilistic else None,
            draft_sampled.flatten(),
            torch.arange(requests + 1, dtype=torch.int32) * 3,
            torch.arange(3).repeat(requests) + 7,
            slots,
            slots.repeat_interleave(3),
            torch.arange(3, dtype=torch.int32).repeat(requests),
            torch.full((requests,), temperature),
            torch.arange(requests) + 10_000,
            steps,
            use_block_verification=method == "block",
        )
    p = torch.softmax(processed, -1).double().numpy()
    first = np.bincount(sampled[:, 0].numpy(), minlength=vocabulary)
    assert _chi_square(first, p[0]) < CHI2_4
    # Complete each request's second token from the target where it emitted one only.
    own = np.random.default_rng(0).choice(vocabulary, requests, p=p[1])
    second = np.where(counts.numpy() >= 2, sampled[:, 1].numpy(), own)
    pairs = np.bincount(sampled[:, 0].numpy() * vocabulary + second, minlength=vocabulary**2)
    assert _chi_square(pairs, np.outer(p[0], p[1]).ravel()) < CHI2_24
    assert (counts > 1).float().mean() > 0.3  # acceptance was really exercised
