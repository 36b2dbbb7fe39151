"""The decode benchmark: throughput against interactivity, batches released together.

Points are batches of C requests behind the engine-side barrier (``measure.py``), with
prompts whose answer is long enough (``answers.py``) and that a plan keeps (``plan.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forespark.bench import answers, plan
from forespark.bench.client import Client
from forespark.bench.estimate import StepClock
from forespark.bench.measure import Arm, measure
from forespark.bench.plan import Point, PromptPlan
from forespark.bench.records import LoadRecord
from forespark.bench.rounds import ArmRounds
from forespark.bench.workloads import Prompt, load_prompts
from forespark.config import Config


class DecodeBenchmark(ArmRounds):
    """Batches behind the barrier; answers.jsonl and plan.jsonl lie beside the records."""

    bench_name = "decode"
    record_type = LoadRecord

    def __init__(self, config: Config, out: Path, endpoint: str | None = None) -> None:
        self.loads = plan.loads(config.bench)
        super().__init__(config, out, endpoint)
        self.prompts = load_prompts(
            self.bench.prompts, seed=self.bench.seed, limit=self.bench.limit
        )

    def points(self, round_index: int) -> list[Point]:
        return plan.points(round_index, self.bench)

    def key(self, arm: str, point: Point) -> tuple[Any, ...]:
        return ("decode", arm, point.load, point.round, point.batch)

    def expected_s(self, point: Point, clock: StepClock) -> float:
        return self.bench.output_tokens * clock.step_s(point.load)

    def prepare(self) -> None:
        chosen = self._pool()
        path = self.out / plan.PLAN
        self.plan = PromptPlan(path, self.prompts, chosen, self.bench.seed)

    def _pool(self) -> list[Prompt]:
        """Prompts with a long enough AR answer; asks the AR arm for unknown ones."""
        path = self.out / answers.ANSWERS
        wanted = plan.wanted_prompts(self.bench)
        known = answers.read_answers(path)
        chosen = answers.pool(self.prompts, known, self.bench, wanted)
        if chosen is None:
            if self.endpoint is not None and self.bench.arms != ["ar"]:
                raise ValueError(
                    f"{path}: the AR answers that choose the prompts are missing; measure the "
                    "arm ar first, in the same folder"
                )
            with self.server("ar", "answers") as server:
                chosen = asyncio.run(
                    answers.determine(server.endpoint, self.prompts, self.bench, wanted, path)
                )
        answers.require_pool(chosen, len(self.prompts), self.bench)
        return chosen

    async def measure(self, client: Client, arm: Arm, point: Point) -> LoadRecord:
        return await measure(client, self.plan.prompts(point), self.bench, point, arm)

    async def warm_up(self, client: Client, todo: Sequence[Point]) -> None:
        """Untimed tokens at the largest and smallest load: first calls compile and allocate."""
        if not self.bench.warmup_tokens:
            return
        ordered = sorted(todo, key=lambda point: point.load)
        for load in sorted({ordered[0].load, ordered[-1].load}, reverse=True):
            point = next(point for point in ordered if point.load == load)
            await client.batch(
                self.plan.prompts(point),
                max_tokens=self.bench.warmup_tokens + 1,
                temperature=self.bench.temperature,
                seed=self.bench.seed,
            )
