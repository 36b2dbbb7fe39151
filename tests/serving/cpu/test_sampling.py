"""Sampling twins against vLLM's kernels: same stream, same token, greedy without noise."""

from __future__ import annotations

import pytest
import torch
from kernel_twins import beside, twins_only
from vllm.v1.worker.gpu.sample import gumbel

MODULE = gumbel.__name__
SLOTS = 6


def arguments(rows: int, vocabulary: int, temperatures: list[float]) -> dict:
    rng = torch.Generator().manual_seed(vocabulary)
    return {
        "logits": torch.randn(rows, vocabulary + 2, generator=rng)[:, :vocabulary] * 3,
        "expanded_idx_mapping": torch.arange(rows, dtype=torch.int32) % SLOTS,
        "temperature": torch.tensor((temperatures * SLOTS)[:SLOTS]),
        "seed": torch.tensor([5, -3, 1 << 40, 0, (1 << 62) + 7, -(1 << 50)]),
        "pos": torch.arange(rows, dtype=torch.int64) * 1001 + 7,
    }


@pytest.mark.parametrize("vocabulary", [5, 1024, 1500], ids=["small", "one block", "odd tail"])
@pytest.mark.parametrize("temperatures", [[0.0], [1.0], [0.0, 0.7, 1.0, 2.5]])
@pytest.mark.parametrize("drafting", [False, True])
def test_gumbel_sample(vocabulary, temperatures, drafting):
    with beside(MODULE, "_gumbel_sample_kernel"):
        gumbel.gumbel_sample(
            **arguments(4, vocabulary, temperatures), apply_temperature=True, is_drafting=drafting
        )


def test_double_precision_noise():
    with beside(MODULE, "_gumbel_sample_kernel"):
        gumbel.gumbel_sample(
            **arguments(3, 40, [1.0, 0.0]),
            apply_temperature=False,
            is_drafting=False,
            use_fp64=True,
        )


@pytest.mark.parametrize("per_token", [False, True])
def test_draft_logits_are_kept(per_token):
    given = arguments(4, 40, [0.0, 1.0])
    given["expanded_idx_mapping"][1] = -1  # a padded row stores nothing and is greedy
    column = torch.tensor([0, 1, 2, 1]) if per_token else torch.tensor(2)
    with beside(MODULE, "_gumbel_sample_kernel"):
        gumbel.gumbel_sample(
            **given,
            apply_temperature=True,
            is_drafting=True,
            logits_cache=torch.full((SLOTS, 3, 44), -1.0),
            logits_cache_col=column,
        )


def test_no_rows():
    with twins_only(MODULE, "_gumbel_sample_kernel"):
        sampled = gumbel.gumbel_sample(
            **arguments(0, 40, [1.0]), apply_temperature=True, is_drafting=False
        )
    assert sampled.shape == (0,)


def test_greedy_is_the_first_argmax_and_ignores_the_seed():
    given = arguments(3, 3000, [0.0])
    given["logits"][:, [17, 2900]] = 50.0
    with twins_only(MODULE, "_gumbel_sample_kernel"):
        sampled = gumbel.gumbel_sample(**given, apply_temperature=True, is_drafting=False)
    assert sampled.tolist() == [17, 17, 17]


def test_masked_tokens_are_never_drawn():
    given = arguments(6, 2048, [1.0])
    given["logits"][:, 3:] = -float("inf")
    with twins_only(MODULE, "_gumbel_sample_kernel"):
        sampled = gumbel.gumbel_sample(**given, apply_temperature=True, is_drafting=False)
    assert (sampled < 3).all()


def test_temperature():
    given = arguments(5, 100, [0.0, 1.0, 0.3])
    with beside(MODULE, "_temperature_kernel"):
        gumbel.apply_temperature(
            given["logits"], given["expanded_idx_mapping"], given["temperature"]
        )
