"""Do ranks that see different numbers plan the same? And what does agreeing cost?

    python scripts/bench/rank_drill.py [--ranks 2,4] [--steps 10000] [--out FILE]

Starts gloo processes, without an engine, that run the scheduling of a served step: planner,
split, distribution and mailboxes, with requests that come, finish and are preempted. Ranks
other than 0 see noise on their scores and survival, draft and accept other tokens, and
bring other latency tables; scores tie often. What rank 0 decides is shared as in the engine
(``forespark/serving/ranks.py``). Every rank notes a digest of each step's lengths, budget
and verified shares, and steps that are not alike on all ranks are counted. Estimates land
at once, as on a CPU, or when they like on each rank, as on a GPU. That the drill can fail
is shown by rounds in which ranks do not share, or do not read estimates in lockstep.

The cost of a message is that of many in a row, for a few batch sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from forespark import record  # noqa: E402
from forespark.fore_d.costs import CostTables  # noqa: E402
from forespark.fore_d.split import distribute, split  # noqa: E402
from forespark.serving.mailbox import Mailbox  # noqa: E402
from forespark.serving.planner import Planner  # noqa: E402
from forespark.serving.proposal import Lengths  # noqa: E402
from forespark.serving.ranks import Ranks  # noqa: E402

K = 7
SLOTS = 16
TIMEOUT_S = 120.0
NOISE = 1e-3
SETTINGS = {
    "draft": "planned",
    "verify": "adaptive",
    "price_other": True,
    "force_length": None,
    "prior_acceptance": 0.6,
}
# Do ranks share, do estimates land late, are they read in lockstep. The first two are how
# the engine runs; ranks must part in the others.
ROUNDS = [(True, False, True), (True, True, True), (False, False, True), (True, True, False)]


class Alone(Ranks):
    """Ranks that do not talk: each keeps its own numbers."""

    def share(self, *tensors: torch.Tensor) -> None:
        pass


class Late:
    """A device event that lands after a number of questions of this rank's own."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._left = rng, 0

    def record(self) -> None:
        self._left = int(self._rng.integers(0, 5))

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        self._left = 0


def tables(rank: int) -> dict[str, Any]:
    """Latency tables that make some drafts worth while; each rank measured others."""
    tokens, factor = [1, 16, 128], 1.0 + 0.3 * rank
    return {
        "schema": 1,
        "key": {},
        "draft": {"tokens": tokens, "ms": [(0.5 + 0.05 * t) * factor for t in tokens]},
        "verify": {
            "batch": [1, SLOTS],
            "per_request": [0, K],
            "ms": [[9.0, 10.0 * factor], [11.0, 24.0 * factor]],
        },
        "other": {"batch": [1, SLOTS], "ms": [0.5, 0.8]},
    }


@dataclass
class Drill:
    """One rank's engine, as far as scheduling goes.

    Attributes:
        shared: what all ranks know: the scheduler's decisions and the true acceptance.
        own: this rank's noise.
        lockstep: estimates are read one step after they were sent.
        digests: one 63-bit number per step.
    """

    ranks: Ranks
    late: bool
    lockstep: bool
    shared: np.random.Generator
    own: np.random.Generator
    digests: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        talking = not isinstance(self.ranks, Alone)
        content = tables(self.ranks.rank)
        content = self.ranks.from_first(lambda: content) if talking else content
        costs = CostTables.from_record(content)
        cpu = torch.device("cpu")
        self.planner = Planner(SLOTS, K, costs, SETTINGS, cpu, self.lockstep)
        if self.late:
            self.planner.scores, self.planner.survival, self.planner.drafts.box = (
                Mailbox(SLOTS, width, cpu, lambda: Late(self.own), self.lockstep)
                for width in (K, K, 2)
            )
        self.survival = torch.zeros(SLOTS, K)
        self.lengths = np.zeros(SLOTS, dtype=np.int64)  # as the device holds them
        self.live: list[int] = []

    def noisy(self, values: np.ndarray) -> torch.Tensor:
        """[R, K] values as this rank computes them; rows stay non-increasing."""
        if self.ranks.rank > 0:
            values = values * (1 + NOISE * self.own.standard_normal(values.shape))
        rows = np.minimum.accumulate(np.clip(values, 0, 1), axis=1)
        return torch.from_numpy(rows.astype(np.float32))

    def step(self) -> None:
        """Verify the last drafts, then plan, split and draft the next ones."""
        self._come_and_go()
        slots = np.array(self.live)
        budget, verified = self._verify(slots)
        self._accept(verified)
        true = np.cumprod(self.shared.uniform(0.2, 1.0, (len(slots), K)), axis=1)
        if self.shared.random() < 0.5:
            true = np.round(true * 8) / 8  # ties, broken by the last bits of each rank
        scores = self.noisy(true)
        self.ranks.share(scores)
        self.planner.scores.send(slots, scores)
        samples = self.shared.random(len(slots)) < 0.9
        limits = np.where(samples, K, 0)
        total = self.planner.draft_lengths_total(slots, samples, int((~samples).sum()))
        if self.shared.random() < 0.5:
            lengths = self.planner.split_on_host(slots, limits, total)
            chosen = Lengths.known(lengths, torch.from_numpy(lengths))
        else:
            on_device = split(scores, total, torch.from_numpy(limits))
            lengths = on_device.numpy()
            chosen = Lengths.split_on_device(on_device, limits, total)
        self.planner.note_drafts(slots, chosen, limits)
        tokens = torch.from_numpy(self.own.integers(0, 50000, (len(slots), K)))
        survival = self.noisy(true * self.shared.uniform(0.8, 1.0, true.shape))
        self.ranks.share(tokens, survival)
        self.survival[slots] = survival
        self.lengths[slots] = lengths
        self.planner.counters.drafter_tokens = chosen.num_tokens
        self.planner.survival.send(slots, survival)
        content = [slots, lengths, verified.numpy(), np.array([total, budget])]
        if not isinstance(self.ranks, Alone):
            content.append(tokens.numpy())  # each rank's own otherwise, whatever is planned
        digest = hashlib.blake2b(b"".join(part.astype(np.int64).tobytes() for part in content))
        self.digests.append(int.from_bytes(digest.digest()[:8], "little") >> 1)

    def _come_and_go(self) -> None:
        """Requests finish or are preempted, others take slots, some of them the same."""
        self.live = [slot for slot in self.live if self.shared.random() > 0.05]
        free = [slot for slot in range(SLOTS) if slot not in self.live]
        wanted = 1 if not self.live else int(self.shared.integers(0, 3))
        for slot in self.shared.permutation(free)[:wanted].tolist():
            self.planner.forget(slot)
            self.lengths[slot] = 0
            self.live.append(slot)

    def _verify(self, slots: np.ndarray) -> tuple[int, torch.Tensor]:
        scheduled = self.shared.integers(K - 2, K + 1, len(slots))
        limits, certain = self.planner.drafts.present(slots, scheduled)
        budget = self.planner.budget(slots, limits, len(slots), len(slots), certain)
        present = np.minimum(self.lengths[slots], scheduled)
        assert 0 <= budget <= present.sum(), (budget, present)
        verified = distribute(self.survival[slots], torch.from_numpy(present), budget)
        assert int(verified.sum()) == budget, "the device fills exactly B"
        return budget, verified

    def _accept(self, verified: torch.Tensor) -> None:
        counts = torch.from_numpy(self.own.integers(0, verified.numpy() + 1))
        sampled = torch.from_numpy(self.own.integers(0, 50000, (len(verified), K + 1)))
        self.ranks.share(sampled, (counts + 1).to(torch.int32), verified - counts)


def run(rank: int, size: int, file: str, rounds: list[dict[str, Any]], answers: Any) -> None:
    """One process. Each round is held by the first ``ranks`` processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{file}", timedelta(seconds=TIMEOUT_S), world_size=size, rank=rank
    )
    for plan in rounds:
        group = dist.new_group(list(range(plan["ranks"])))
        if rank < plan["ranks"]:
            found = _cost(plan, group) if "requests" in plan else _differing(plan, group, rank)
            if rank == 0:
                answers.put({**plan, **found})
    dist.barrier()
    dist.destroy_process_group()


def _differing(plan: dict[str, Any], group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Run the steps of a round; how many were not alike."""
    ranks = (Ranks if plan["share"] else Alone)(group)
    shared, own = np.random.default_rng(plan["seed"]), np.random.default_rng(rank)
    drill = Drill(ranks, plan["late"], plan["lockstep"], shared, own)
    for _ in range(plan["steps"]):
        drill.step()
    mine = torch.tensor(drill.digests)
    all_of_them = [torch.empty_like(mine) for _ in range(plan["ranks"])]
    dist.all_gather(all_of_them, mine, group=group)
    return {"differing": int((torch.stack(all_of_them) != mine).any(0).sum())}


def _cost(plan: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Microseconds of each message of a step."""
    ranks, R, found = Ranks(group), plan["requests"], {}
    messages = {
        "acceptance": (
            torch.zeros(R, K + 1, dtype=torch.int64), torch.zeros(2, R, dtype=torch.int32),
        ),
        "scores": (torch.zeros(R, K),),
        "drafts": (torch.zeros(R * K, dtype=torch.int64), torch.zeros(R, K)),
    }  # fmt: skip
    for what, tensors in messages.items():
        dist.barrier(group)
        for repeat in range(plan["steps"] + 10):
            if repeat == 10:
                began = time.perf_counter()
            ranks.share(*tensors)
        dist.barrier(group)
        found[what] = round((time.perf_counter() - began) / plan["steps"] * 1e6, 1)
    return {"us": found}


def drill(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run ``rounds`` (ranks, steps, late, share, seed) in fresh processes.

    Returns:
        The rounds with ``differing`` (steps not alike on all ranks) or ``us`` (messages).

    Raises:
        RuntimeError: a process failed or all together took longer than their timeout.
    """
    size = max(plan["ranks"] for plan in rounds)
    context = processes.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        group = processes.start_processes(
            run, (size, f"{folder}/meeting", rounds, answers), size, join=False
        )
        found = []
        deadline = time.monotonic() + TIMEOUT_S + sum(plan["steps"] for plan in rounds) * 0.05
        while not group.join(timeout=0.2):
            while not answers.empty():
                found.append(answers.get())
            if time.monotonic() > deadline:
                for process in group.processes:
                    process.kill()
                raise RuntimeError("ranks hang: they wait for each other in a broadcast")
        while not answers.empty():
            found.append(answers.get())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="group sizes")
    parser.add_argument("--steps", type=int, default=10000, help="steps of each round")
    parser.add_argument("--out", type=Path, default=Path("runs/ranks.json"))
    args = parser.parse_args()
    found = []
    for size in [int(size) for size in args.ranks.split(",")]:
        plans = [
            {"ranks": size, "share": share, "late": late, "lockstep": lockstep, "seed": 7}
            for share, late, lockstep in ROUNDS
        ]
        steps = [args.steps if one["share"] and one["lockstep"] else 500 for one in plans]
        costs = [{"ranks": size, "requests": R, "steps": 300} for R in (1, 8, 64, 192)]
        for one in drill(
            [{**plan, "steps": n} for plan, n in zip(plans, steps, strict=True)] + costs
        ):
            print(one)
            found.append(one)
    record.write_json(args.out, {"provenance": record.provenance(), "rounds": found})
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
