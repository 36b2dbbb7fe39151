"""Random schedules and what must hold for each of them.

Used by the tests on a few thousand and by the scheduler benchmark on 100,000. Scores have
ties, zeros, negative entries, NaN, rows that rise and rows that end early; prices are of
both kinds, per token and per captured graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forespark.fore_d.costs import CostTables
from forespark.fore_d.schedule import plan
from forespark.fore_d.split import distribute, split

GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
MOST_REQUESTS, MOST_DRAFTS = 24, 15
PROPERTIES = {
    "length": "every draft length is in 0..K",
    "total": "lengths add up to the planned total, blocks to the planned drafter tokens",
    "score": "no drafted position has a NaN, negative or zero score",
    "top": "no position left out is worth more than one drafted: drafts are prefixes of the "
    "pooled ranking",
    "budget": "B is at most the drafted tokens",
    "verified": "verified lengths are within the drafted ones and add up to B",
    "dearer": "no price that rises makes the best rate rise",
    "fixed": "a dearer fixed part never makes a schedule smaller",
    "scale": "prices in another unit change no choice",
}


@dataclass(frozen=True)
class Prices:
    """The same device, and three others made from it."""

    plain: CostTables
    dearer: CostTables  # every price at least as high
    fixed: CostTables  # a constant on top of every step
    doubled: CostTables


def random_prices(rng: np.random.Generator) -> Prices:
    """Base prices and slopes over three orders of magnitude, on graphs or per token."""
    stepwise = bool(rng.integers(2))
    tokens = np.array(GRAPHS)
    batch, each = np.array([1, 4, 24]), np.array([0, 1, 4, 15])
    base, slope = 10 ** rng.uniform(-1, 1.5, 2), 10 ** rng.uniform(-2.5, 0.5, 2)
    bump = np.sort(rng.uniform(0, base[0], len(tokens))) * rng.integers(2)
    draft = base[0] + slope[0] * tokens + bump
    verify = base[1] + slope[1] * batch[:, None] * (1 + each)
    other = np.full(2, 10 ** rng.uniform(-2, 1))

    def tables(draft: np.ndarray, verify: np.ndarray, other: np.ndarray) -> CostTables:
        return CostTables(
            tokens, draft, batch, each, verify, np.array([1, 24]), other,
            draft_stepwise=stepwise, verify_buckets=tokens if stepwise else tokens[:0],
        )  # fmt: skip

    more = np.cumsum(rng.uniform(0, 1, len(tokens)))
    grid = np.cumsum(np.cumsum(rng.uniform(0, 1, verify.shape), axis=0), axis=1)
    return Prices(
        tables(draft, verify, other),
        tables(draft + more, verify + grid, other + rng.uniform(0, 2)),
        tables(draft, verify, other + base.sum() * rng.uniform(0.05, 2)),
        tables(2 * draft, 2 * verify, 2 * other),
    )


def random_scores(rng: np.random.Generator) -> np.ndarray:
    """Scores [n, K] float32, sometimes as an estimator makes them, sometimes damaged."""
    n, K = int(rng.integers(1, MOST_REQUESTS + 1)), int(rng.integers(1, MOST_DRAFTS + 1))
    g = np.cumprod(rng.random((n, K)) ** rng.uniform(0.1, 1.5), axis=1).astype(np.float32)
    kind = rng.integers(4)
    if kind == 1:
        g = np.round(g, 1)
    elif kind == 2:
        g[rng.random((n, K)) < 0.1] = np.nan
        g[rng.integers(n)] = np.nan
    elif kind == 3:
        g += rng.normal(0, 0.1, (n, K)).astype(np.float32)
    return g


def broken(g: np.ndarray, N: int, prices: Prices) -> list[str]:
    """Names of ``PROPERTIES`` that the schedule of these scores breaks."""
    n, K = g.shape
    found = plan(g, n, N, prices.plain)
    lengths = split(torch.from_numpy(g), found.draft_total)
    verified = distribute(torch.from_numpy(g), lengths, found.verify_total).numpy()
    d = lengths.numpy()
    drafted = np.arange(K) < d[:, None]
    worth = np.minimum.accumulate(np.where(g > 0, g, np.float32(0)), axis=1)
    others = [plan(g, n, N, table) for table in (prices.dearer, prices.fixed, prices.doubled)]
    dearer, fixed, doubled = others
    holds = {
        "length": ((d >= 0) & (d <= K)).all(),
        "total": d.sum() == found.draft_total and (d + (d > 0)).sum() == found.drafter_tokens,
        "score": (g[drafted] > 0).all(),
        "top": worth[drafted].min(initial=np.inf) >= worth[~drafted].max(initial=0.0),
        "budget": 0 <= found.verify_total <= d.sum(),
        "verified": ((verified >= 0) & (verified <= d)).all()
        and verified.sum() == found.verify_total,
        "dearer": dearer.objective <= found.objective * (1 + 1e-12),
        "fixed": fixed.verify_total >= found.verify_total
        and fixed.draft_total >= found.draft_total,
        "scale": (doubled.draft_total, doubled.verify_total)
        == (found.draft_total, found.verify_total),
    }
    assert holds.keys() == PROPERTIES.keys()
    return [name for name, held in holds.items() if not held]


def check_schedules(count: int, seed: int) -> dict[str, Any]:
    """Draw ``count`` schedules; how often each property broke, and the first that did."""
    rng = np.random.default_rng(seed)
    prices = [random_prices(rng) for _ in range(200)]
    times: Counter[str] = Counter()
    first: int | None = None
    drafted = 0
    for trial in range(count):
        g = random_scores(rng)
        N = len(g) + int(rng.integers(0, 3)) * int(rng.integers(0, 200))
        table = prices[trial % len(prices)]
        wrong = broken(g, N, table)
        times.update(wrong)
        drafted += plan(g, len(g), N, table.plain).draft_total > 0
        if wrong and first is None:
            first = trial
    found = {name: times[name] for name in PROPERTIES}
    return {"schedules": count, "seed": seed, "drafting": drafted, "broken": found, "first": first}
