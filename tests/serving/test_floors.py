"""Least gain, batch and draft: against every schedule tried, and off when they are 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_planner import K, costs, planner

from forespark.fore_d.costs import CostTables
from forespark.fore_d.schedule import plan, replan_budget
from forespark.serving.floors import Floors, verify_prices


def scores(rng: np.random.Generator, n: int) -> np.ndarray:
    """[n, K] non-increasing rows, some of zeros."""
    rows = np.sort(rng.random((n, K)), axis=1)[:, ::-1] * rng.integers(0, 2, (n, 1))
    return rows.astype(np.float32)


def graphs() -> CostTables:
    """Prices of a GPU: constant inside token buckets."""
    return CostTables(
        [8, 16, 40], [1.0, 2.0, 6.0], [1, 8], [0, 2, 4], [[4, 5, 6], [6, 9, 14]], [1, 8],
        [0.5, 0.6], draft_stepwise=True, verify_buckets=np.array([4, 8, 16, 32]),
    )  # fmt: skip


def best_with_least(g, N, prices, least):
    """(M, rate) by trying every (M, B) in which each request keeps its first ``least``."""
    n = len(g)
    rest = sorted((x for x in g[:, least:].ravel() if x > 0), reverse=True)
    best = (0, -1.0)
    for b in range(len(rest) + 1):
        gain = n + g[:, :least].sum() + sum(rest[:b])
        verify = prices.verify_ms(N + n * least + b, n) + prices.other_ms(n)
        for m in range(b, len(rest) + 1):
            rate = gain / (prices.draft_ms(n * (least + 1) + m) + verify)
            if rate > best[1] + 1e-12:
                best = (n * least + m, rate)
    return best


@pytest.mark.parametrize("prices", [costs(), costs(0.1), graphs()], ids=["dear", "cheap", "graphs"])
def test_least_draft_is_the_best_of_all_schedules_that_keep_it(prices):
    rng = np.random.default_rng(0)
    for trial in range(60):
        n, least = int(rng.integers(1, 7)), int(rng.integers(1, K + 1))
        g = scores(rng, n)
        floors = Floors(min_draft=least)
        total = floors.draft_total(g, n, prices)
        assert n * least <= total <= n * K
        wanted, rate = best_with_least(g, n, prices, least)
        found, found_rate = floors._joint(g, n, prices, True)
        assert found == total and found_rate == pytest.approx(rate), trial
        if not prices.draft_stepwise:
            assert total == wanted
        limits = rng.integers(0, K + 1, n)
        budget = floors.budget(g, limits, n, n, prices, int((limits + 1).sum()))
        assert np.minimum(limits, least).sum() <= budget <= limits.sum()


def test_switched_off_they_change_nothing():
    rng = np.random.default_rng(1)
    off = Floors.of({})
    for prices in (costs(), graphs()):
        for _ in range(20):
            g = scores(rng, 5)
            assert off.draft_total(g, 5, prices) == plan(g, 5, 5, prices).draft_total
            limits = rng.integers(0, K + 1, 5)
            drafted = np.where(np.arange(K) < limits[:, None], g, np.float32(0))
            wanted = replan_budget(drafted, 5, 5, prices, int(limits.sum()), 9)
            assert off.budget(g, limits, 5, 5, prices, 9) == wanted
    g = torch.rand(3, K)
    assert off.favour(g) is g


def rate(g, prices, kept):
    """Tokens per ms of verifying the first ``kept`` of each full draft."""
    n = len(g)
    ms = prices.draft_ms(n * (K + 1)) + prices.verify_ms(n + kept.sum(), n) + prices.other_ms(n)
    return (n + sum(row[:k].sum() for row, k in zip(g, kept, strict=True))) / ms


def test_trimming_needs_the_least_gain():
    prices = costs()
    g = np.array([[0.9, 0.5, 0.2, 0.1]] * 4, dtype=np.float32)
    limits = np.full(4, K)
    best = Floors().budget(g, limits, 4, 4, prices, 4 * (K + 1))
    assert best % 4 == 0 and best < 4 * K
    gain = rate(g, prices, np.full(4, best // 4)) / rate(g, prices, limits) - 1
    for floor, wanted in ((0.99 * gain, best), (1.01 * gain, 4 * K)):
        assert Floors(min_gain=floor).budget(g, limits, 4, 4, prices, 4 * (K + 1)) == wanted


def test_shortening_needs_the_least_gain_over_full_blocks_verified_at_best():
    prices = costs()
    g = np.array([[0.9, 0.5, 0.2, 0.1]] * 4, dtype=np.float32)
    best = plan(g, 4, 4, prices)
    assert best.draft_total < 4 * K
    kept = Floors().budget(g, np.full(4, K), 4, 4, prices, 4 * (K + 1))
    gain = best.objective / rate(g, prices, np.full(4, kept // 4)) - 1
    assert gain > 0
    assert Floors(min_gain=0.99 * gain).draft_total(g, 4, prices) == best.draft_total
    assert Floors(min_gain=1.01 * gain).draft_total(g, 4, prices) == 4 * K


def test_nan_and_hopeless_scores_still_get_their_least_draft():
    g = np.array([[np.nan] * K, [0.0] * K], dtype=np.float32)
    floors = Floors(min_draft=1)
    assert floors.draft_total(g, 2, costs()) == 2
    assert floors.budget(g, np.array([1, 0]), 2, 2, costs(), 2) == 1


@pytest.mark.parametrize("prices", [costs(), graphs()], ids=["linear", "graphs"])
def test_prices_of_many_token_counts(prices):
    tokens = np.arange(1, 60)
    for batch in (1, 3, 8, 12):
        wanted = [prices.verify_ms(int(t), batch) for t in tokens]
        np.testing.assert_allclose(verify_prices(prices, tokens, batch), wanted)


def test_small_batches_are_not_planned():
    host = planner(min_batch=4)
    slots = np.arange(5)
    host.scores.known[:] = True
    host.scores.rows[:] = 0.01  # nothing worth drafting
    assert host.draft_lengths_total(slots[:3], np.ones(3, bool)) == 3 * K
    assert host.same_length == K
    assert host.budget(slots[:3], np.array([K, 2, 0]), 3, 3, K + 2) == K + 2
    assert host.draft_lengths_total(slots, np.ones(5, bool)) == 0
    assert host.same_length is None
    assert host.budget(slots, np.full(5, K), 5, 5, 5 * K) == 0
    # Those still prefilling do not make a batch large.
    assert host.draft_lengths_total(slots, np.arange(5) < 3) == 3 * K


def test_no_request_goes_without_its_least_draft():
    host = planner(min_draft=1)
    slots = np.arange(4)
    host.scores.known[slots] = host.survival.known[slots] = True
    host.scores.rows[slots] = [[0.99] * K] * 2 + [[0.3] + [0.0] * (K - 1)] * 2
    total = host.draft_lengths_total(slots, np.ones(4, bool))
    lengths = host.split_on_host(slots, np.array([K, K, K, 0]), total)
    assert lengths[2] >= 1 and lengths[3] == 0 and lengths.sum() == min(total, 3 * K)
    survival = torch.tensor([[0.9] * K, [0.9] * K, [0.01] * K])
    from forespark.fore_d.split import distribute

    kept = distribute(host.floors.favour(survival), torch.tensor([K, K, 2]), 5)
    assert kept.tolist() == [2, 2, 1]
