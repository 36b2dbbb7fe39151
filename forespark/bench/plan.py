"""What the decode benchmark measures, in which order, and with which prompts.

A batch's prompts are drawn once and kept in plan.jsonl: whatever is added later (arms,
loads, prompts), the same (load, round, batch) times the same prompts for every arm.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forespark.bench.workloads import Prompt
from forespark.config import BenchConfig
from forespark.record import append_jsonl, read_jsonl

logger = logging.getLogger(__name__)

PLAN = "plan.jsonl"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """One batch to time."""

    load: int
    round: int
    batch: int


def batches(load: int, bench: BenchConfig) -> int:
    """Batches per (arm, load, round): small loads time more, so that a point has enough."""
    return max(bench.batches_per_point, math.ceil(bench.requests_per_point / load))


def loads(bench: BenchConfig) -> list[int]:
    """Loads of the decode benchmark; ``--limit`` leaves out those above the number of prompts.

    Raises:
        ValueError: no load is configured, or every one is above the limit.
    """
    wanted = sorted(set(bench.loads))
    if not wanted:
        raise ValueError("bench.loads is empty: want at least one number of requests")
    if bench.limit is None:
        return wanted
    kept = [load for load in wanted if load <= bench.limit]
    if not kept:
        raise ValueError(
            f"--limit {bench.limit} leaves no load of {wanted}: raise it or add a smaller load "
            "to bench.loads"
        )
    if len(kept) < len(wanted):
        left_out = wanted[len(kept) :]
        logger.warning("--limit %d: loads %s are left out", bench.limit, left_out)
    return kept


def points(round_index: int, bench: BenchConfig) -> list[Point]:
    """All batches of one round, small loads first."""
    return [
        Point(load, round_index, batch)
        for load in loads(bench)
        for batch in range(batches(load, bench))
    ]


def wanted_prompts(bench: BenchConfig) -> int:
    """Usable prompts that let every batch of a point have its own."""
    wanted = max(load * batches(load, bench) for load in loads(bench))
    return wanted if bench.limit is None else min(wanted, bench.limit)


def rotated(arms: list[T], turn: int) -> list[T]:
    """Arms in an order that moves by one each turn, so that none is always first."""
    shift = turn % max(len(arms), 1)
    return arms[shift:] + arms[:shift]


class PromptPlan:
    """Prompts per batch, remembered in ``plan.jsonl``."""

    def __init__(self, path: Path, prompts: list[Prompt], usable: list[Prompt], seed: int) -> None:
        self.path = path
        self.by_id = {prompt.id: prompt for prompt in prompts}
        self.usable = usable
        self.seed = seed
        self.drawn: dict[Point, list[str]] = {}
        for row in read_jsonl(path) if path.exists() else []:
            point = Point(row["load"], row["round"], row["batch"])
            self.drawn[point] = row["prompt_ids"]

    def prompts(self, point: Point) -> list[Prompt]:
        """The ``point.load`` prompts of a batch.

        With fewer usable prompts than requests some occur more than once: the prefix
        cache is off, so they are requests like any other.

        Raises:
            ValueError: a remembered prompt is no longer in the sources.
        """
        if point not in self.drawn:
            ids = self._draw(point)
            row = {"load": point.load, "round": point.round, "batch": point.batch}
            append_jsonl(self.path, {**row, "prompt_ids": ids})
            self.drawn[point] = ids
        try:
            return [self.by_id[prompt_id] for prompt_id in self.drawn[point]]
        except KeyError as error:
            raise ValueError(
                f"{self.path}: prompt {error} of load {point.load} is not in bench.prompts any "
                "more (or cut by --limit): use the former sources, or another --out"
            ) from None

    def _draw(self, point: Point) -> list[str]:
        rng = random.Random(f"{self.seed}/{point.load}/{point.round}/{point.batch}")
        ids: list[str] = []
        while len(ids) < point.load:
            order = [prompt.id for prompt in self.usable]
            rng.shuffle(order)
            ids += order[: point.load - len(ids)]
        if len(self.usable) < point.load:
            logger.warning(
                "load %d has only %d usable prompts, so some are used more than once",
                point.load,
                len(self.usable),
            )
        return ids
