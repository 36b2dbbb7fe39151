"""Host totals: what is drafted and verified, and what a reused slot remembers."""

import numpy as np
import pytest
import torch

from forespark.fore_d.costs import CostTables
from forespark.serving.planner import Planner

K = 4


def costs(verify_slope: float = 1.0) -> CostTables:
    batches = [1, 8]
    each = [0, 2, 4]
    return CostTables(
        [1, 40],
        [1.0, 1.0 + 0.2 * 39],
        batches,
        each,
        [[10 + verify_slope * b * (1 + v) for v in each] for b in batches],
        [1, 8],
        [0.5, 0.5],
    )


def planner(**changes) -> Planner:
    settings = {
        "draft": "planned",
        "verify": "adaptive",
        "price_other": True,
        "force_length": None,
        "prior_acceptance": 0.6,
    } | changes
    return Planner(8, K, costs(), settings, torch.device("cpu"))


def test_unlikely_drafts_are_not_made_when_every_token_is_paid_for():
    host = planner()
    slots = np.arange(4)
    host.scores.known[slots] = True
    host.scores.rows[slots] = [[0.9, 0.8, 0.7, 0.6]] * 2 + [[0.02, 0.01, 0.0, 0.0]] * 2
    few = host.draft_lengths_total(slots, np.ones(4, bool))
    assert 0 < few <= 8
    host.scores.rows[slots] = 0.01
    assert host.draft_lengths_total(slots, np.ones(4, bool)) == 0


def test_a_prefilling_request_drafts_nothing():
    host = planner(draft="full", verify="full")
    samples = np.array([True, False, True])
    assert host.draft_lengths_total(np.arange(3), samples) == 2 * K
    assert host.draft_lengths_total(np.arange(3), np.zeros(3, bool)) == 0


def test_a_new_request_uses_the_mean_of_the_others_then_the_prior():
    host = planner()
    host.scores.known[[0, 1]] = True
    host.scores.rows[[0, 1]] = [[0.9, 0.8, 0.7, 0.6]] * 2
    host.scores.rows[2] = 99.0  # what an earlier request left in the slot
    host.forget(2)
    with_mean = host.draft_lengths_total(np.arange(3), np.ones(3, bool))
    host.scores.rows[2], host.scores.known[2] = host.scores.rows[0], True
    assert host.draft_lengths_total(np.arange(3), np.ones(3, bool)) == with_mean
    fresh = planner()
    fresh.scores.rows[:] = np.nan
    assert 0 <= fresh.draft_lengths_total(np.arange(3), np.ones(3, bool)) <= 3 * K


@pytest.mark.parametrize("draft", ["planned", "full"])
def test_budget_never_exceeds_drafts_present(draft):
    host = planner(draft=draft)
    host.scores.known[:] = host.survival.known[:] = True
    host.scores.rows[:] = [0.99, 0.98, 0.97, 0.96]
    host.survival.rows[:] = [0.99, 0.98, 0.97, 0.96]
    limits = np.array([4, 0, 1])
    assert host.budget(np.arange(3), limits, 3, 3, int(limits.sum())) <= 5
    assert host.budget(np.arange(3), np.zeros(3, np.int64), 3, 3, 0) == 0
    # A draft was made but every position is hopeless: B = 0 while sum of d > 0.
    host.scores.rows[:] = 1e-6
    host.survival.rows[:] = 1e-6
    assert host.budget(np.arange(3), limits, 3, 3, int(limits.sum())) == 0


def test_forced_lengths_verify_everything():
    host = planner(force_length=3)
    assert host.draft_lengths_total(np.arange(2), np.ones(2, bool)) == 6
    assert host.budget(np.arange(2), np.array([3, 2]), 2, 2, 5) == 5


def test_length_follows_the_force_from_step_to_step():
    host = planner(force_length=K)
    totals = []
    for length in (K, 1, K):
        host.force_length = length
        totals.append(host.draft_lengths_total(np.arange(2), np.ones(2, bool)))
    assert totals == [2 * K, 2, 2 * K]


def test_host_split_gives_the_planned_total_to_the_likeliest():
    host = planner()
    slots = np.array([3, 5, 1])
    host.scores.known[slots] = True
    host.scores.rows[slots] = [[0.9, 0.8, 0.1, 0.0], [0.5, 0.4, 0.3, 0.2], [0.95, 0.9, 0.9, 0.9]]
    lengths = host.split_on_host(slots, np.array([4, 4, 0]), 3)
    assert lengths.tolist() == [2, 1, 0], "the prefilling request stays out"
