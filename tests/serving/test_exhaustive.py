"""The exhaustive arm's planner: whole triangles in, searched lengths and B out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_planner import K, costs

from forespark.fore_d.search import exhaustive, most_requests
from forespark.fore_d.survival import entries, survival
from forespark.serving.exhaustive import ExhaustivePlanner, check_arm

SETTINGS = {
    "draft": "planned",
    "verify": "adaptive",
    "price_other": True,
    "force_length": None,
    "prior_acceptance": 0.6,
}


def planner() -> ExhaustivePlanner:
    return ExhaustivePlanner(8, K, costs(0.3), SETTINGS, torch.device("cpu"))


def estimators(scale: torch.Tensor, bias: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(form="triangle", read=lambda z: z, scale=scale, bias=bias)


def test_lengths_are_those_of_the_search_and_b_that_of_the_drafts_made():
    host, slots = planner(), np.array([5, 2, 7])
    T = entries(K, "triangle")
    z = torch.randn(3, T, generator=torch.Generator().manual_seed(4)) + 1
    scale, bias = torch.full((T,), 0.9), torch.full((T,), 0.1)
    host.publish(slots, z, estimators(scale, bias))
    S = survival(z, scale, bias, K)[0].numpy()
    samples = np.array([True, False, True])
    total = host.draft_lengths_total(slots, samples, prefill=3)
    found, budget, _ = exhaustive(S[samples], 5, costs(0.3))
    lengths = host.split_on_host(slots, np.array([K, 0, K]), total)
    assert lengths.tolist() == [found[0], 0, found[1]] and sum(found) == total > 0
    host.drafts.put(slots, lengths)
    host.counters.drafter_tokens = int((lengths + (lengths > 0)).sum())
    assert host.budget(slots, lengths, 2, 5, sum(lengths)) == budget > 0
    assert host.split_on_host(slots, np.array([1, 0, 0]), total).tolist() == [
        min(found[0], 1),
        0,
        0,
    ]


def test_a_reused_slot_forgets_its_triangle():
    host, slots = planner(), np.array([1])
    one, zero = torch.ones(entries(K, "triangle")), torch.zeros(entries(K, "triangle"))
    host.publish(slots, torch.full((1, entries(K, "triangle")), -9.0), estimators(one, zero))
    assert host.draft_lengths_total(slots, np.ones(1, bool)) == 0
    host.forget(1)
    assert host.draft_lengths_total(slots, np.ones(1, bool)) > 0, "the prior is worth drafting"


def test_what_cannot_be_searched_is_refused_before_it_is_served():
    check_arm(most_requests(7), 7)
    with pytest.raises(ValueError, match=r"target\.max_num_seqs: got 512 requests with K=15"):
        check_arm(512, 15)
    with pytest.raises(ValueError, match="got 2 tensor-parallel ranks"):
        check_arm(8, 7, 2)
