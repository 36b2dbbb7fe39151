"""The scheduler benchmark: decision time against the batch, loss against exhaustive search.

Three kinds of rows in records.jsonl:

- ``time``: median microseconds of one host decision, every decider on the same batches,
  one call of each in turn, at every size and round. ``plan`` is the joint schedule alone
  (Section 6.4's quantity), ``search`` the exhaustive search on the same estimates; the
  others are vLLM's own manager and all that our host decides in a step.
- ``loss``: rate of the joint schedule and of the best one, both valued by each request's
  own survival curves, on batches drawn from recorded drafts.
- ``schedules``: random schedules and how many broke one of the properties.
"""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from forespark.bench.offline import append_row, digest, open_folder, prices_digest
from forespark.bench.properties import PROPERTIES, check_schedules
from forespark.bench.recorded import Drafts, synthetic_drafts
from forespark.config import Config
from forespark.fore_d.costs import CostTables
from forespark.fore_d.envelope import scores_host
from forespark.fore_d.schedule import plan
from forespark.fore_d.search import exhaustive, most_requests, schedule_value
from forespark.fore_d.split import split

BENCH = "scheduler"
LOSS_SIZES = (1, 2, 4, 8, 16)  # requests in a batch of recorded drafts
_BATCHES = 4  # different draws that a decider is timed on
_PATIENCE_S = 4.0  # a slow decider is called less often, at least three times

# (scores [n, K], acceptance [n, K], prices) -> calls by name; given by the serving room.
Deciders = Callable[[np.ndarray, np.ndarray, CostTables], dict[str, Callable[[], int]]]


class SchedulerBenchmark:
    """One folder of scheduler records."""

    def __init__(
        self, config: Config, out: Path, drafts: Drafts | None, costs: CostTables | None
    ) -> None:
        """
        Args:
            drafts: recorded ones; None draws synthetic ones.
            costs: measured prices for the loss; None takes those of the timing.
        """
        self.config, self.bench, self.out = config, config.bench, out
        rng = np.random.default_rng(self.bench.seed)
        self.drafts = drafts or synthetic_drafts(rng, 2000, self.bench.decision_drafts)
        self.costs = costs or prices(self.bench.decision_drafts, max(LOSS_SIZES))
        self.run_id = uuid.uuid4().hex[:12]

    def run(self, deciders: Deciders) -> Path:
        """Measure what is missing; returns the folder."""
        K = self.bench.decision_drafts
        fixed = {"K": K, "seed": self.bench.seed, "drafts": self.drafts.source,
                 "drafts_crc32": digest(self.drafts.pre, self.drafts.accepted),
                 "prices_crc32": prices_digest(self.costs)}  # fmt: skip
        rows = open_folder(self.config, self.out, BENCH, fixed, self.run_id)
        done = {(row["kind"], row.get("round")) for row in rows}
        sizes = {row["n"] for row in rows if row["kind"] == "time"}
        for round_index in range(self.bench.rounds):
            if ("time", round_index) not in done or not sizes >= set(self.bench.batch_sizes):
                for row in time_decisions(self.config, deciders, round_index):
                    self._append(row)
        if ("loss", None) not in done:
            for row in losses(self.drafts, self.costs, self.bench.seed, self.bench.limit):
                self._append(row)
        if ("schedules", None) not in done and self.bench.schedules:
            found = _properties(self.bench.schedules, self.bench.seed)
            self._append({"kind": "schedules", **found})
            if found["first"] is not None:
                raise ValueError(f"schedules broke a property: {found['broken']}")
        return self.out

    def _append(self, row: dict[str, Any]) -> None:
        append_row(self.out, BENCH, self.run_id, self.config.target.name, row)


def prices(K: int, n: int) -> CostTables:
    """Made-up prices with the proportions of a large model on GPUs, graphs up to 8,192 tokens.

    The target's step is flat until memory stops being its limit and then pays by the token;
    the drafter costs a tenth. Only the sizes matter for how long a decision takes.
    """
    graphs = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 1024, 16), *range(1024, 8193, 256)])
    batch = np.unique(np.geomspace(1, max(n, 2), 12).astype(np.int64))
    each = np.array([v for v in (0, 1, 3, 7, 15, 31, 63) if v < K] + [K])

    def target_ms(tokens: np.ndarray) -> np.ndarray:
        return 9.0 + 0.012 * np.maximum(tokens - 256, 0) + 0.002 * tokens

    return CostTables(
        graphs, 0.9 + 0.1 * target_ms(graphs), batch, each,
        target_ms(batch[:, None] * (1 + each)), np.array([1, max(n, 2)]), np.array([0.5, 1.0]),
        draft_stepwise=True, verify_buckets=graphs,
    )  # fmt: skip


def time_decisions(config: Config, deciders: Deciders, round_index: int) -> list[dict[str, Any]]:
    """Rows of one round: every size, every decider."""
    bench, rows = config.bench, []
    K = bench.decision_drafts
    sizes = bench.batch_sizes if round_index % 2 == 0 else bench.batch_sizes[::-1]
    for n in tqdm(sizes, desc=f"decisions, round {round_index}", unit="size"):
        rng = np.random.default_rng([bench.seed, n])
        batches = [_calls(synthetic_drafts(rng, n, K), deciders) for _ in range(_BATCHES)]
        for name, micros in _time(batches, bench.decisions).items():
            low, middle, high = (float(x) for x in np.percentile(micros, [10, 50, 90]))
            rows.append(
                {"kind": "time", "decider": name, "n": n, "K": K, "round": round_index,
                 "calls": len(micros), "p10_us": low, "median_us": middle, "p90_us": high}
            )  # fmt: skip
    return rows


def _calls(drafts: Drafts, deciders: Deciders) -> dict[str, Callable[[], Any]]:
    """The deciders of one batch, by name."""
    n, K = len(drafts), drafts.K
    costs = prices(K, n)
    scores = scores_host(drafts.pre.sum(axis=2)).astype(np.float32)
    alive = np.concatenate([np.ones((n, 1)), drafts.pre[:, K - 1]], axis=1)
    acceptance = (alive[:, 1:] / alive[:, :-1]).astype(np.float32)
    calls: dict[str, Callable[[], Any]] = {"plan": lambda: plan(scores, n, n, costs)}
    if n <= most_requests(K):
        calls["search"] = lambda: exhaustive(drafts.pre, n, costs)
    return {**calls, **deciders(scores, acceptance, costs)}


def _time(batches: list[dict[str, Callable[[], Any]]], calls: int) -> dict[str, list[float]]:
    """Microseconds of every call. Deciders take turns, so a disturbance meets all alike; the
    search, which empties the caches, comes after the others."""
    names = sorted(batches[0], key=lambda name: (name == "search", name))
    for batch in batches:  # first calls compile and fill tables
        for name in names:
            batch[name]()
    micros: dict[str, list[float]] = {name: [] for name in names}
    quick, slow = names[: len(names) - ("search" in names)], names[-1:]
    gc.collect()
    gc.disable()
    try:
        for group in (quick, slow) if "search" in names else (quick,):
            began = time.perf_counter()
            for turn in range(calls):
                if turn >= 3 and time.perf_counter() - began > _PATIENCE_S:
                    break
                for name in group:
                    call = batches[turn % len(batches)][name]
                    start = time.perf_counter_ns()
                    call()
                    micros[name].append((time.perf_counter_ns() - start) / 1e3)
    finally:
        gc.enable()
    return micros


def losses(drafts: Drafts, costs: CostTables, seed: int, limit: int | None) -> list[dict[str, Any]]:
    """One row per batch: rate of the joint schedule and of the best schedule.

    Args:
        limit: batches per size at most.
    """
    rows = []
    for n in LOSS_SIZES:
        if n > most_requests(drafts.K):
            break
        batches = drafts.batches(n, seed, limit)
        for index, batch in enumerate(tqdm(batches, desc=f"loss, {n} requests", unit="batch")):
            value, best = _values(batch.pre, costs)
            rows.append({"kind": "loss", "source": drafts.source, "n": n, "K": drafts.K,
                         "batch": index, "rate": value, "best_rate": best})  # fmt: skip
    return rows


def _values(survival: np.ndarray, costs: CostTables) -> tuple[float, float]:
    """Tokens per millisecond of the joint schedule and of the exhaustive one."""
    n = len(survival)
    scores = scores_host(survival.sum(axis=2)).astype(np.float32)
    found = plan(scores, n, n, costs)
    lengths = split(torch.from_numpy(scores), found.draft_total).tolist()
    value = schedule_value(survival, lengths, found.verify_total, n, costs)
    return value, exhaustive(survival, n, costs)[2]


def _properties(count: int, seed: int) -> dict[str, Any]:
    """``check_schedules`` in parts, with a progress bar."""
    part = 1000
    total: dict[str, Any] = {"schedules": 0, "seed": seed, "drafting": 0, "first": None,
                             "broken": dict.fromkeys(PROPERTIES, 0)}  # fmt: skip
    for start in tqdm(range(0, count, part), desc="random schedules", unit="thousand"):
        found = check_schedules(min(part, count - start), seed + start // part)
        if found["first"] is not None and total["first"] is None:
            total["first"] = start + found["first"]
        for name in PROPERTIES:
            total["broken"][name] += found["broken"][name]
        total["schedules"] += found["schedules"]
        total["drafting"] += found["drafting"]
    return total
