"""The oracle benchmark: what a schedule with perfect knowledge would have been worth.

Offline replay of recorded drafts (``recorded``) at every load: each policy chooses lengths
and budgets for the same batches of anchors, the recorded outcome of a draft of that length
says how many tokens it would have brought, and the latency tables what the step would have
cost. ``forespark`` sees the estimates, as served; ``oracle`` sees the outcomes and searches
all schedules. What lies between them is left to better estimates (Section 7).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from forespark.bench.offline import append_row, digest, open_folder, prices_digest
from forespark.bench.recorded import Drafts
from forespark.config import Config
from forespark.fore_d.costs import CostTables
from forespark.fore_d.envelope import scores_host
from forespark.fore_d.schedule import plan, replan_budget
from forespark.fore_d.search import exhaustive, most_requests
from forespark.fore_d.split import distribute, split

BENCH = "oracle"
Choice = tuple[np.ndarray, np.ndarray]  # [n] drafted, [n] verified


def ar(drafts: Drafts, costs: CostTables) -> Choice:
    """No drafts."""
    nothing = np.zeros(len(drafts), dtype=np.int64)
    return nothing, nothing


def dflash2(drafts: Drafts, costs: CostTables) -> Choice:
    """Whole blocks, wholly verified."""
    whole = np.full(len(drafts), drafts.K)
    return whole, whole


def forespark_nojs(drafts: Drafts, costs: CostTables) -> Choice:
    """Whole blocks; B from their post-draft survival."""
    n, K = len(drafts), drafts.K
    whole, survival = np.full(n, K), drafts.post[:, K - 1]
    budget = replan_budget(survival, n, n, costs, n * K, n * (K + 1))
    return whole, _distribute(survival, whole, budget)


def forespark(drafts: Drafts, costs: CostTables) -> Choice:
    """The joint schedule, B distributed by the post-draft survival of the drafts made."""
    n = len(drafts)
    scores = scores_host(drafts.pre.sum(axis=2)).astype(np.float32)
    found = plan(scores, n, n, costs)
    lengths = split(torch.from_numpy(scores), found.draft_total).numpy()
    return lengths, _distribute(_made(drafts.post, lengths), lengths, found.verify_total)


def searched(drafts: Drafts, costs: CostTables) -> Choice:
    """As ``forespark``, but the best of all schedules by the same estimates."""
    found, budget, _ = exhaustive(drafts.pre, len(drafts), costs)
    lengths = np.array(found, dtype=np.int64)
    return lengths, _distribute(_made(drafts.post, lengths), lengths, budget)


def oracle(drafts: Drafts, costs: CostTables) -> Choice:
    """The best of all schedules by what the drafts really brought."""
    known = np.arange(drafts.K) < drafts.accepted[:, :, None]
    found, budget, _ = exhaustive(known.astype(np.float64), len(drafts), costs)
    lengths = np.array(found, dtype=np.int64)
    return lengths, _distribute(_made(known, lengths), lengths, budget)


POLICIES: dict[str, Callable[[Drafts, CostTables], Choice]] = {
    "ar": ar,
    "dflash2": dflash2,
    "forespark_nojs": forespark_nojs,
    "forespark": forespark,
    "exhaustive": searched,
    "oracle": oracle,
}
_SEARCHING = ("exhaustive", "oracle")


def _made(curves: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[n, K] row d - 1 of each request's triangle [K, K]; its limit hides the row of d = 0."""
    return curves[np.arange(len(lengths)), np.maximum(lengths, 1) - 1]


def _distribute(survival: np.ndarray, lengths: np.ndarray, budget: int) -> np.ndarray:
    values = torch.from_numpy(np.ascontiguousarray(survival, dtype=np.float32))
    return distribute(values, torch.from_numpy(lengths), budget).numpy()


def replay(drafts: Drafts, costs: CostTables, policy: str) -> dict[str, Any]:
    """Tokens and milliseconds of one step of this batch under a policy."""
    n = len(drafts)
    lengths, verified = POLICIES[policy](drafts, costs)
    accepted = np.minimum(verified, _made(drafts.accepted[:, :, None], lengths)[:, 0])
    blocks = int((lengths + (lengths > 0)).sum())
    ms = costs.draft_ms(blocks) + costs.verify_ms(n + int(verified.sum()), n) + costs.other_ms(n)
    return {
        "tokens": n + int(accepted.sum()),
        "ms": ms,
        "drafted": int(lengths.sum()),
        "verified": int(verified.sum()),
        "accepted": int(accepted.sum()),
    }


class OracleBenchmark:
    """One folder of replayed policies."""

    def __init__(self, config: Config, out: Path, drafts: Drafts, costs: CostTables) -> None:
        """
        Args:
            drafts: recorded ones, whole triangles.
            costs: measured prices.
        """
        self.config, self.out, self.drafts, self.costs = config, out, drafts, costs
        self.run_id = uuid.uuid4().hex[:12]

    def run(self) -> Path:
        """Replay every (load, policy) that has no record yet; returns the folder.

        Raises:
            ValueError: fewer recorded anchors than the smallest load.
        """
        bench, drafts = self.config.bench, self.drafts
        fixed = {"seed": bench.seed, "limit": bench.limit,
                 "prices_crc32": prices_digest(self.costs),
                 "drafts_crc32": digest(drafts.pre, drafts.accepted)}  # fmt: skip
        rows = open_folder(self.config, self.out, BENCH, fixed, self.run_id)
        done = {(row["load"], row["policy"]) for row in rows}
        loads = [load for load in bench.loads if load <= len(drafts)]
        if not loads:
            raise ValueError(
                f"bench.loads: got {bench.loads}, but only {len(drafts)} anchors are recorded: "
                "choose smaller loads, or calibrate on more prompts"
            )
        for load in loads:
            batches = drafts.batches(load, bench.seed, bench.limit)
            for policy in POLICIES:
                searches = policy in _SEARCHING
                if (load, policy) in done or (searches and load > most_requests(drafts.K)):
                    continue
                label = f"{policy}, load {load}"
                steps = [replay(b, self.costs, policy) for b in tqdm(batches, desc=label)]
                row = {name: sum(step[name] for step in steps) for name in steps[0]}
                head = {"load": load, "policy": policy, "steps": len(steps), "K": drafts.K,
                        "source": drafts.source}  # fmt: skip
                append_row(self.out, BENCH, self.run_id, self.config.target.name, head | row)
        return self.out
