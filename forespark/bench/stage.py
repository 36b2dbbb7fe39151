"""The benchmarks of eval.py by name: what each would do, what it needs, and how it runs.

What other rooms do for them comes in as ``Rooms``, since benchmarks do not import them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespark.bench import compare, plan, replay
from forespark.bench.acceptance import AcceptanceBenchmark
from forespark.bench.decode import DecodeBenchmark
from forespark.bench.scheduler import Deciders
from forespark.config import Config


@dataclass(frozen=True, slots=True)
class Rooms:
    """What benchmarks ask of serving and calibration."""

    check_arms: Callable[[Config, list[str]], None]  # ValueError when a file is missing
    resolve: Callable[..., Any]
    deciders: Deciders
    predictor: Callable[[Config, Path], None]  # full-block traces, judged, into a folder


@dataclass(frozen=True, slots=True)
class Stage:
    """One benchmark into one folder; see ``benchmark``."""

    name: str
    config: Config
    out: Path
    endpoint: str | None
    rooms: Rooms

    def steps(self) -> list[str]:
        """What ``run`` would do, for --dry-run."""
        bench = self.config.bench
        if self.name == "decode":
            loads = plan.loads(bench)
            return [f"decode of {a} at loads {loads}, {bench.rounds} rounds" for a in bench.arms]
        if self.name == "acceptance":
            made = AcceptanceBenchmark(self.config, self.out, self.endpoint)
            sets = {name: len(prompts) for name, prompts in made.prompts.items()}
            return [f"acceptance of {drafter} on {sets}" for drafter in made.drafters]
        return [f"{self.name}, seed {bench.seed}, into {self.out}"]

    def check(self, arms: list[str] | None = None) -> None:
        """Find every file that the servers of ``arms`` (default: all) will need."""
        arms = self.config.bench.arms if arms is None else arms
        if self.name == "decode" and self.endpoint is None:
            self.rooms.check_arms(self.config, arms)

    def run(self, begin: Callable[[], None]) -> str:
        """Measure what is missing; ``begin`` is called when nothing stands in the way.

        Returns:
            The command that draws the result; ``{0}`` stands for the target's flag.
        """
        if self.name == "decode":
            return self._decode(begin)
        if self.name == "acceptance":
            made = AcceptanceBenchmark(self.config, self.out, self.endpoint)
            begin()
            made.run()
        elif self.name == "predictor":
            begin()
            self.rooms.predictor(self.config, self.out)
        else:
            replay.run(self.name, self.config, self.out, self.rooms.resolve, self.rooms.deciders)
            begin()
        also = "; python plot/reliability.py {0}" if self.name == "predictor" else ""
        return f"python plot/{self.name}.py {{0}}{also}"

    def _decode(self, begin: Callable[[], None]) -> str:
        made = DecodeBenchmark(self.config, self.out, self.endpoint)
        self.check(made.unfinished())
        begin()
        try:
            made.run()
        finally:
            if made.done:  # also of an interrupted run: what is there is shown
                compare.summarize_folder(self.out)
        return "python plot/pareto.py {0}; python plot/table.py {0}"
