"""The joint schedule against every (M, B) pair and against every schedule."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from fore_d_cases import device_like_tables, random_survival, random_tables, tables

from forespark.fore_d.costs import CostTables
from forespark.fore_d.envelope import scores_host
from forespark.fore_d.schedule import Plan, plan, plan_reference, pool, replan_budget
from forespark.fore_d.search import (
    check_batch,
    exhaustive,
    exhaustive_reference,
    most_requests,
    schedule_value,
)
from forespark.fore_d.split import split


def random_scores(rng: np.random.Generator, n: int, K: int) -> np.ndarray:
    """Non-increasing rows with ties inside and across rows, zeros, sometimes float noise."""
    g = rng.random((n, K)) ** 2
    if rng.integers(2):
        g = np.round(g, 1)
    return -np.sort(-g, axis=1).astype(np.float32)


def test_plan_equals_the_reference():
    rng = np.random.default_rng(0)
    for _ in range(400):
        n, K = int(rng.integers(1, 8)), int(rng.integers(1, 6))
        g, N = random_scores(rng, n, K), n + int(rng.integers(0, 20))
        if rng.integers(4) == 0:  # rows that rise, turn negative or break off
            g += rng.normal(0, 0.2, (n, K)).astype(np.float32)
            g[rng.random((n, K)) < 0.1] = np.nan
        costs, price_other = random_tables(rng), bool(rng.integers(2))
        got = plan(g, n, N, costs, price_other)
        want = plan_reference(g, n, N, costs, price_other)
        assert got.objective == pytest.approx(want.objective, rel=1e-12)
        assert (got.draft_total, got.verify_total, got.drafter_tokens) == (
            want.draft_total,
            want.verify_total,
            want.drafter_tokens,
        )


def _gap(rng: np.random.Generator, costs, row_noise: float) -> float:
    n, K = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    S = random_survival(rng, n, K, row_noise)
    g = scores_host(S.sum(axis=2))
    N = n + int(rng.integers(0, 3))
    chosen = plan(g, n, N, costs)
    lengths = split(torch.from_numpy(g), chosen.draft_total).tolist()
    value = schedule_value(S, lengths, chosen.verify_total, N, costs)
    best = exhaustive(S, N, costs)[2]
    assert value <= best * (1 + 1e-12)
    return 1 - value / best


def test_within_a_hundredth_of_a_percent_of_the_exhaustive_optimum():
    """Device-like prices, rows that agree to 0.05 logits: mean loss at most 0.01 %.

    Both sides are valued by each request's own length-d curve. The loss grows with the
    disagreement of rows: the envelope values a draft as if wholly verified, so it
    cannot see that a longer draft may be worth drafting for its first positions only.
    """
    rng = np.random.default_rng(1)
    gaps = [_gap(rng, device_like_tables(rng), 0.05) for _ in range(400)]
    assert np.mean(gaps) <= 1e-4


def test_never_above_the_optimum_with_wild_prices_and_rows():
    """Any prices, rows 0.3 logits apart: far from real batches, so only a coarse bound."""
    rng = np.random.default_rng(2)
    gaps = [_gap(rng, random_tables(rng), 0.3) for _ in range(150)]
    assert np.mean(gaps) <= 1e-2


def test_search_equals_listing_every_schedule():
    rng = np.random.default_rng(8)
    for trial in range(60):
        n, K = (1, 4) if trial % 10 == 0 else (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        S, costs, N = random_survival(rng, n, K, 0.4), random_tables(rng), n + int(rng.integers(9))
        if trial % 3 == 0:
            S = np.round(S, 1)  # ties, and positions that are worth nothing
        lengths, budget, value = exhaustive(S, N, costs)
        want = exhaustive_reference(S, N, costs)
        assert value == pytest.approx(want[2], rel=1e-12)
        assert schedule_value(S, lengths, budget, N, costs) == pytest.approx(value, rel=1e-12)
        assert all(0 <= d <= K for d in lengths)


def test_search_takes_batches_that_cannot_be_listed():
    """8^12 schedules; one that is optimal by inspection."""
    S = np.zeros((12, 7, 7))
    S[3, 4, :5], S[7, 1, :2] = 1.0, 1.0
    lengths, budget, _ = exhaustive(S, 12, tables(verify_slope=0.1, draft_slope=0.01))
    assert lengths == (0, 0, 0, 5, 0, 0, 0, 2, 0, 0, 0, 0) and budget == 7


def test_exhaustive_refuses_large_batches():
    most = most_requests(7)
    check_batch(most, 7)
    with pytest.raises(ValueError, match=f"at most {most}.*fewer requests"):
        exhaustive(np.zeros((most + 1, 7, 7)), 8, tables())
    with pytest.raises(ValueError, match="budget"):
        schedule_value(np.zeros((1, 2, 2)), [1], 2, 1, tables())


def test_dearer_steps_never_raise_the_objective():
    rng = np.random.default_rng(4)
    for _ in range(200):
        n, K = int(rng.integers(1, 7)), int(rng.integers(1, 8))
        g = random_scores(rng, n, K)
        base = rng.uniform(0.1, 5, 4)
        cheap = plan(g, n, n, tables(*base))
        dear = plan(g, n, n, tables(*(base * rng.uniform(1, 3, 4))))
        assert dear.objective <= cheap.objective * (1 + 1e-12)


def test_totals_fall_as_tokens_get_dearer():
    """Same fixed price, rising price a token: less drafted, less verified, then nothing."""
    g = random_scores(np.random.default_rng(5), 6, 7)
    plans = [plan(g, 6, 6, tables(1, s, 20 - 6 * s, s)) for s in (0.0, 0.05, 0.2, 0.5, 1, 3)]
    for cheap, dear in itertools.pairwise(plans):
        assert dear.draft_total <= cheap.draft_total
        assert dear.verify_total <= cheap.verify_total
    assert plans[0].verify_total == int((g > 0).sum())
    assert plans[-1].draft_total == 0


def test_mean_draft_length_falls_with_load():
    K = 7
    row = (0.75 ** np.arange(1, K + 1)).astype(np.float32)
    costs = tables(verify_base=40, verify_slope=1.5)
    means = [plan(np.tile(row, (n, 1)), n, n, costs).draft_total / n for n in (1, 4, 16, 64)]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1]


def test_over_drafting_fills_the_bucket_and_stops_at_the_last_positive_score():
    g = np.array([[0.9, 0.05, 0.04, 0.0]], dtype=np.float32)
    step = plan(g, 1, 1, tables(verify_base=1, verify_slope=1, draft_base=0.1, stepwise=True))
    # Two drafter tokens fit graph 2; a verified second draft does not pay.
    assert (step.draft_total, step.verify_total, step.drafter_tokens) == (1, 1, 2)
    flat = plan(
        g, 1, 1, tables(verify_base=1, verify_slope=1, draft_base=0, draft_slope=0, stepwise=True)
    )
    assert flat.draft_total == 1  # equal prices in two buckets: the smaller one
    # Three drafter tokens pad to graph 4, so a third draft is free to make; verifying it
    # beside N = 2 would need graph 8.
    g[0, 1] = 0.9
    full = plan(g, 1, 2, tables(verify_base=1, verify_slope=0.5, draft_base=0.1, stepwise=True))
    assert (full.draft_total, full.verify_total) == (3, 2)


def test_nothing_to_draft():
    costs = tables()
    for g in (np.zeros((3, 4), np.float32), np.full((3, 4), np.nan, np.float32)):
        p = plan(g, 3, 3, costs)
        assert p == Plan(0, 0, 3 / (costs.verify_ms(3, 3) + costs.other_ms(3)), 0)
    assert plan(np.zeros((0, 4), np.float32), 0, 32, costs).draft_total == 0


def test_equal_rates_verify_less():
    """1 token in 10 ms or 2 in 20 ms: the cheaper step."""
    costs = CostTables([1, 8], [0, 0], [1, 2], [0, 1], [[10, 20], [10, 20]], [1, 2], [0, 0])
    p = plan(np.ones((1, 1), np.float32), 1, 1, costs)
    assert (p.draft_total, p.verify_total) == (0, 0)
    assert plan_reference(np.ones((1, 1)), 1, 1, costs) == p


def test_pool_counts_first_positions_in_ties():
    g = np.array([[0.5, 0.5], [0.5, 0.0]], dtype=np.float32)
    ranked, first = pool(g)
    assert ranked.tolist() == [0.5, 0.5, 0.5]
    assert first.tolist() == [0.5, 0.5]


def test_budget_is_recomputed_with_the_actual_tokens_and_capped():
    rng = np.random.default_rng(6)
    costs = tables(verify_slope=1.0)
    for _ in range(100):
        g = random_scores(rng, 5, 6)
        p = plan(g, 5, 5, costs)
        again = replan_budget(g, 5, 5, costs, p.draft_total, p.drafter_tokens)
        assert again == p.verify_total  # nothing changed
        fewer = replan_budget(g, 5, 5, costs, 2, p.drafter_tokens)
        assert fewer <= 2
        # A prefill makes the step longer anyway, so more drafts pay.
        assert replan_budget(g, 5, 200, costs, p.draft_total, p.drafter_tokens) >= again
    assert replan_budget(g, 5, 5, costs, 0, 12) == 0


@pytest.mark.parametrize("n,K", [(64, 7), (192, 15)])
def test_host_plan_takes_microseconds(n, K):
    """Best of 50, so that a busy machine does not fail it; 15 and 60 us when idle."""
    g = random_scores(np.random.default_rng(7), n, K)
    costs = tables()
    plan(g, n, n, costs)  # compiles
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        plan(g, n, n, costs)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 200e-6
