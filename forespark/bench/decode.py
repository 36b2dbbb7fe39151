"""The decode benchmark: throughput against interactivity, arms interleaved by rounds.

Every round starts each arm's server once, in an order that rotates, and runs all loads
on it; so a slow drift of the machine meets all arms alike. With ``bench.side_by_side`` the
servers of a round stand beside one another and take turns batch by batch, in a rotating
order, so that a drift of minutes does not matter either. Finished batches are skipped,
which makes a killed run continue and a longer run extend a shorter one.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forespark.bench import answers, plan
from forespark.bench.client import Client
from forespark.bench.folder import check_folder, start_run
from forespark.bench.measure import Arm, BatchFailed, measure
from forespark.bench.plan import Point, PromptPlan
from forespark.bench.records import RECORDS, append_record, read_records
from forespark.bench.server import Server, serve_command
from forespark.bench.workloads import Prompt, load_prompts
from forespark.config import Config
from forespark.record import append_jsonl

logger = logging.getLogger(__name__)

ERRORS = "errors.jsonl"


class DecodeBenchmark:
    """One benchmark folder and the settings it is filled with."""

    def __init__(self, config: Config, out: Path, endpoint: str | None = None) -> None:
        """
        Args:
            config: Composed configuration; ``bench.arms`` are measured.
            out: Folder of records.jsonl, run.json, answers.jsonl, plan.jsonl, logs/.
            endpoint: A running server of the only arm; None starts servers.

        Raises:
            ValueError: no arm, or several arms for one endpoint.
        """
        self.config, self.bench, self.out, self.endpoint = config, config.bench, out, endpoint
        if not self.bench.arms:
            raise ValueError("bench.arms is empty: name arms with --arm a,b or bench.arms=[a,b]")
        if endpoint is not None and len(self.bench.arms) != 1:
            raise ValueError(
                f"--endpoint serves one arm, but {len(self.bench.arms)} are configured: "
                "name it with --arm"
            )
        self.loads = plan.loads(self.bench)
        self.prompts = load_prompts(
            self.bench.prompts, seed=self.bench.seed, limit=self.bench.limit
        )
        self.run_id = uuid.uuid4().hex[:12]
        check_folder(config, out)
        self.done = {record.key for record in read_records(out / RECORDS)}
        self.failures = 0

    def run(self) -> Path:
        """Measure everything that is missing.

        Returns:
            The folder.

        Raises:
            ValueError: some batch or server failed; what was measured is kept.
        """
        if not self.unfinished():
            logger.info("every point is measured already")
            return self.out
        start_run(self.config, self.out, self.run_id)
        chosen = self._pool()
        prompts = PromptPlan(self.out / plan.PLAN, self.prompts, chosen, self.bench.seed)
        total = sum(len(self.missing(arm, r)) for arm in self.bench.arms for r in self._rounds())
        with tqdm(total=total, desc="decode", unit="batch") as progress:
            for round_index in self._rounds():
                arms = plan.rotated(self.bench.arms, round_index)
                arms = [arm for arm in arms if self.missing(arm, round_index)]
                together = self.bench.side_by_side and self.endpoint is None
                for group in [arms] if together else [[arm] for arm in arms]:
                    self._run_arms(group, round_index, prompts, progress)
        if self.failures:
            raise ValueError(
                f"{self.failures} failures, see {self.out / ERRORS}; the same command "
                "measures what is missing"
            )
        return self.out

    def unfinished(self) -> list[str]:
        """Arms that have batches to measure."""
        return [arm for arm in self.bench.arms if any(self.missing(arm, r) for r in self._rounds())]

    def missing(self, arm: str, round_index: int) -> list[Point]:
        """Batches of a round that have no record yet."""
        return [
            point
            for point in plan.points(round_index, self.bench)
            if ("decode", arm, point.load, point.round, point.batch) not in self.done
        ]

    def _rounds(self) -> range:
        return range(self.bench.rounds)

    def _server(self, arm: str, label: str, trace: Path | None, place: int = 0) -> Any:
        """Context manager whose value has ``endpoint``; a given endpoint is left alone.

        Args:
            place: number of servers beside this one that started before.
        """
        if self.endpoint is not None:
            return nullcontext(self)
        serve = self.config.serve
        port = serve.port + place
        return Server(
            serve_command(self.config, arm, trace=trace, port=port),
            host=serve.host,
            port=port,
            log=self.out / "logs" / f"{label}.log",
            ready_timeout_s=serve.ready_timeout_s,
            label=label,
        )

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
            with self._server("ar", "answers", None) as server:
                chosen = asyncio.run(
                    answers.determine(server.endpoint, self.prompts, self.bench, wanted, path)
                )
        answers.require_pool(chosen, len(self.prompts), self.bench)
        return chosen

    def _run_arms(
        self, arms: list[str], round_index: int, prompts: PromptPlan, progress: tqdm[Any]
    ) -> None:
        """Missing batches of one round: of one arm, or of arms served side by side."""
        running: list[tuple[Arm, Server | DecodeBenchmark]] = []
        with ExitStack() as stack:
            for place, arm in enumerate(arms):
                label = f"{arm}-r{round_index}"
                trace = self._trace(label)
                progress.set_postfix_str(label)
                served = Arm(arm, self.config.target.name, self.run_id, trace)
                try:
                    server = stack.enter_context(self._server(arm, label, trace, place))
                except ValueError as error:
                    # One arm that cannot start must not cost the others their round.
                    self._failed(arm, round_index, str(error))
                    tqdm.write(f"{label}: {error}")
                else:
                    running.append((served, server))
            asyncio.run(self._take_turns(running, round_index, prompts, progress))

    def _trace(self, label: str) -> Path | None:
        """Empty trace file of a server that is started here."""
        if self.endpoint is not None:
            return None
        trace = (self.out / "traces" / f"{label}.jsonl").resolve()
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.unlink(missing_ok=True)  # byte offsets taken later are this server's
        return trace

    async def _take_turns(
        self,
        running: list[tuple[Arm, Server | DecodeBenchmark]],
        round_index: int,
        prompts: PromptPlan,
        progress: tqdm[Any],
    ) -> None:
        """Every missing batch of the served arms; the arm that goes first changes."""
        async with AsyncExitStack() as stack:
            clients = {}
            for arm, server in running:
                assert server.endpoint is not None
                client = Client(server.endpoint, timeout_s=self.bench.request_timeout_s)
                clients[arm.name] = await stack.enter_async_context(client)
                await self._warm_up(client, self.missing(arm.name, round_index), prompts)
            for number, point in enumerate(plan.points(round_index, self.bench)):
                for arm, server in plan.rotated(list(running), number):
                    if point in self.missing(arm.name, round_index):
                        alive = await self._measure(
                            clients[arm.name], server, arm, point, prompts, progress
                        )
                        if not alive:
                            running.remove((arm, server))

    async def _measure(
        self,
        client: Client,
        server: Server | DecodeBenchmark,
        arm: Arm,
        point: Point,
        prompts: PromptPlan,
        progress: tqdm[Any],
    ) -> bool:
        """One batch; False when the arm's server is gone."""
        progress.set_postfix_str(f"{arm.name} round {point.round} load {point.load}")
        try:
            record = await measure(client, prompts.prompts(point), self.bench, point, arm)
        except BatchFailed as error:
            self._failed(arm.name, point.round, str(error), point)
            tqdm.write(f"{arm.name}, load {point.load}: {error}")
            if isinstance(server, Server) and not server.alive():
                died = server.failure("died while it was measured")
                self._failed(arm.name, point.round, died)
                tqdm.write(f"{arm.name}-r{point.round}: {died}")
                return False
        else:
            append_record(self.out / RECORDS, record)
            self.done.add(record.key)
        progress.update()
        return True

    async def _warm_up(self, client: Client, todo: list[Point], prompts: PromptPlan) -> None:
        """Untimed tokens at the largest and smallest load: first calls compile and allocate."""
        if not self.bench.warmup_tokens:
            return
        ordered = sorted(todo, key=lambda point: point.load)
        for load in sorted({ordered[0].load, ordered[-1].load}, reverse=True):
            point = next(point for point in ordered if point.load == load)
            await client.batch(
                prompts.prompts(point),
                max_tokens=self.bench.warmup_tokens + 1,
                temperature=self.bench.temperature,
                seed=self.bench.seed,
            )

    def _failed(self, arm: str, round_index: int, error: str, point: Point | None = None) -> None:
        self.failures += 1
        row = {"arm": arm, "round": round_index, "run_id": self.run_id, "error": error}
        append_jsonl(self.out / ERRORS, {**row, **(asdict(point) if point else {})})
