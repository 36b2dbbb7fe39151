"""Arms measured in rounds on servers of their own: what the served benchmarks share.

Every round starts each arm's server once, in an order that rotates, and measures all points
on it; so a slow drift of the machine meets all arms alike. With ``bench.side_by_side`` the
servers of a round stand beside one another and take turns point by point, in a rotating
order, so that a drift of minutes does not matter either. Finished points are skipped, which
makes a killed run continue and a longer run extend a shorter one.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from forespark.bench import plan
from forespark.bench.client import Client
from forespark.bench.estimate import START_S, StepClock, in_words
from forespark.bench.folder import check_folder, start_run
from forespark.bench.measure import Arm, NotMeasured
from forespark.bench.records import RECORDS, Record, append_record, read_records
from forespark.bench.server import Server, serve_command
from forespark.config import Config
from forespark.record import append_jsonl

logger = logging.getLogger(__name__)

ERRORS = "errors.jsonl"


class ArmRounds(ABC):
    """One benchmark folder, and the arms and settings it is filled with.

    A subclass says what the points of a round are and how one is measured. A point is a
    dataclass with a ``round``; its other fields go into errors.jsonl as they are.
    """

    bench_name: ClassVar[str]
    record_type: ClassVar[type[Record]]
    prefix_cache = False  # of the servers; emptied by whoever wants it on

    def __init__(self, config: Config, out: Path, endpoint: str | None = None) -> None:
        """
        Args:
            config: Composed configuration; ``bench.arms`` are measured.
            out: Folder of records.jsonl, run.json, errors.jsonl, logs/, traces/.
            endpoint: A running server of the only arm; None starts servers.

        Raises:
            ValueError: no arm, several arms for one endpoint, or records of other settings.
        """
        self.config, self.bench, self.out, self.endpoint = config, config.bench, out, endpoint
        if not self.bench.arms:
            raise ValueError("bench.arms is empty: name arms with --arm a,b or bench.arms=[a,b]")
        if endpoint is not None and len(self.bench.arms) != 1:
            raise ValueError(
                f"--endpoint serves one arm, but {len(self.bench.arms)} are configured: "
                "name it with --arm"
            )
        self.run_id = uuid.uuid4().hex[:12]
        check_folder(config, out, self.bench_name)
        self.done = {record.key for record in read_records(out / RECORDS, self.record_type)}
        self.failures = 0

    @abstractmethod
    def points(self, round_index: int) -> Sequence[Any]:
        """Everything that one round measures of each arm, in order."""

    @abstractmethod
    def key(self, arm: str, point: Any) -> tuple[Any, ...]:
        """Identity of the record of a point."""

    @abstractmethod
    def expected_s(self, point: Any, clock: StepClock) -> float:
        """A guess of the seconds that one arm takes for a point."""

    @abstractmethod
    def prepare(self) -> None:
        """What must be known before the first round, servers of its own included."""

    @abstractmethod
    async def warm_up(self, client: Client, todo: Sequence[Any]) -> None:
        """Untimed work after a server's start."""

    @abstractmethod
    async def measure(self, client: Client, arm: Arm, point: Any) -> Record:
        """One point.

        Raises:
            NotMeasured: it failed; the run goes on with the others.
        """

    def run(self) -> Path:
        """Measure everything that is missing.

        Returns:
            The folder.

        Raises:
            ValueError: some point or server failed; what was measured is kept.
        """
        if not self.unfinished():
            logger.info("every point is measured already")
            return self.out
        start_run(self.config, self.out, self.run_id, self.bench_name)
        self.prepare()
        rounds = range(self.bench.rounds)
        total = self._announce()
        with tqdm(total=total, desc=self.bench_name, unit="point") as progress:
            for round_index in rounds:
                arms = plan.rotated(self.bench.arms, round_index)
                arms = [arm for arm in arms if self.missing(arm, round_index)]
                together = self.bench.side_by_side and self.endpoint is None
                for group in [arms] if together else [[arm] for arm in arms]:
                    self._run_arms(group, round_index, progress)
        if self.failures:
            raise ValueError(
                f"{self.failures} failures, see {self.out / ERRORS}; the same command "
                "measures what is missing"
            )
        return self.out

    def _announce(self) -> int:
        """Say how much is to do and how long that may take; returns the number of points."""
        clock = StepClock(self.config)
        groups = [self.missing(a, r) for r in range(self.bench.rounds) for a in self.bench.arms]
        groups = [points for points in groups if points]
        servers = 0 if self.endpoint is not None else len(groups)
        seconds = sum(self.expected_s(point, clock) for points in groups for point in points)
        points = sum(map(len, groups))
        tqdm.write(
            f"{self.bench_name}: {points} points on {servers} servers, "
            f"{in_words(seconds + servers * START_S)}"
        )
        return points

    def unfinished(self) -> list[str]:
        """Arms that have points to measure."""
        rounds = range(self.bench.rounds)
        return [arm for arm in self.bench.arms if any(self.missing(arm, r) for r in rounds)]

    def missing(self, arm: str, round_index: int) -> list[Any]:
        """Points of a round that have no record yet."""
        return [p for p in self.points(round_index) if self.key(arm, p) not in self.done]

    def server(self, arm: str, label: str, trace: Path | None = None, place: int = 0) -> Any:
        """Context manager whose value has ``endpoint``; a given endpoint is left alone.

        Args:
            place: number of servers beside this one that started before.
        """
        if self.endpoint is not None:
            return nullcontext(self)
        serve = self.config.serve
        port = serve.port + place
        cache = self.prefix_cache
        return Server(
            serve_command(self.config, arm, trace=trace, port=port, prefix_cache=cache),
            host=serve.host,
            port=port,
            log=self.out / "logs" / f"{label}.log",
            ready_timeout_s=serve.ready_timeout_s,
            label=label,
            # vLLM empties its cache on demand in its development mode only.
            environment={"VLLM_SERVER_DEV_MODE": "1"} if cache else None,
        )

    def _run_arms(self, arms: list[str], round_index: int, progress: tqdm[Any]) -> None:
        """Missing points of one round: of one arm, or of arms served side by side."""
        running: list[tuple[Arm, Server | ArmRounds]] = []
        with ExitStack() as stack:
            for place, arm in enumerate(arms):
                label = f"{arm}-r{round_index}"
                trace = self._trace(label)
                progress.set_postfix_str(label)
                served = Arm(arm, self.config.target.name, self.run_id, trace)
                try:
                    server = stack.enter_context(self.server(arm, label, trace, place))
                except ValueError as error:
                    # One arm that cannot start must not cost the others their round.
                    self._failed(arm, round_index, str(error))
                    tqdm.write(f"{label}: {error}")
                else:
                    running.append((served, server))
            asyncio.run(self._take_turns(running, round_index, progress))

    def _trace(self, label: str) -> Path | None:
        """Empty trace file of a server that is started here."""
        if self.endpoint is not None:
            return None
        trace = (self.out / "traces" / f"{label}.jsonl").resolve()
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.unlink(missing_ok=True)  # byte offsets taken later are this server's
        return trace

    async def _take_turns(
        self, running: list[tuple[Arm, Server | ArmRounds]], round_index: int, progress: tqdm[Any]
    ) -> None:
        """Every missing point of the served arms; the arm that goes first changes."""
        async with AsyncExitStack() as stack:
            clients = {}
            for arm, server in running:
                assert server.endpoint is not None
                client = Client(server.endpoint, timeout_s=self.bench.request_timeout_s)
                clients[arm.name] = await stack.enter_async_context(client)
                await self.warm_up(client, self.missing(arm.name, round_index))
            for number, point in enumerate(self.points(round_index)):
                for arm, server in plan.rotated(list(running), number):
                    if point in self.missing(arm.name, round_index):
                        alive = await self._one(clients[arm.name], server, arm, point, progress)
                        if not alive:
                            running.remove((arm, server))

    async def _one(
        self,
        client: Client,
        server: Server | ArmRounds,
        arm: Arm,
        point: Any,
        progress: tqdm[Any],
    ) -> bool:
        """One point; False when the arm's server is gone."""
        words = ", ".join(f"{name} {value}" for name, value in asdict(point).items())
        progress.set_postfix_str(f"{arm.name}, {words}")
        try:
            record = await self.measure(client, arm, point)
        except NotMeasured as error:
            self._failed(arm.name, point.round, str(error), point)
            tqdm.write(f"{arm.name}, {words}: {error}")
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

    def _failed(self, arm: str, round_index: int, error: str, point: Any = None) -> None:
        self.failures += 1
        row = {"arm": arm, "round": round_index, "run_id": self.run_id, "error": error}
        append_jsonl(self.out / ERRORS, {**row, **(asdict(point) if point else {})})
