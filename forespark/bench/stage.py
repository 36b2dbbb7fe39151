"""The benchmarks of eval.py by name: what each would do, what it needs, and how it runs.

What other rooms do for them comes in as ``Rooms``, since benchmarks do not import them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespark.bench import attainment, compare, plan, replay
from forespark.bench.acceptance import AcceptanceBenchmark
from forespark.bench.decode import DecodeBenchmark
from forespark.bench.e2e import ClosedLoopBenchmark, QuestionBenchmark
from forespark.bench.rounds import ArmRounds
from forespark.bench.scheduler import Deciders
from forespark.bench.server import serve_command
from forespark.bench.slo import SloBenchmark
from forespark.config import Config

# Benchmarks that serve every arm in rounds.  The time per token is read off decode's records.
SERVED: dict[str, type[ArmRounds]] = {
    "decode": DecodeBenchmark,
    "breakdown": DecodeBenchmark,
    "e2e": ClosedLoopBenchmark,
    "mathcode": QuestionBenchmark,
    "slo": SloBenchmark,
}
# How the result is drawn; {0} stands for the target's flag.
DRAWN = {
    "decode": "python plot/pareto.py {0}; python plot/table.py {0}",
    "breakdown": "python plot/breakdown.py {0}",
    "e2e": "python plot/pareto.py {0} --bench e2e; python plot/table.py {0} --bench e2e",
    "mathcode": "python plot/pareto.py {0} --bench mathcode; "
    "python plot/table.py {0} --bench mathcode",
    "predictor": "python plot/predictor.py {0}; python plot/reliability.py {0}",
}


def folder_name(bench: str) -> str:
    """Folder under RUN_DIR/bench that holds a benchmark's records."""
    return SERVED[bench].bench_name if bench in SERVED else bench


@dataclass(frozen=True, slots=True)
class Rooms:
    """What benchmarks ask of serving and calibration."""

    check_arms: Callable[[Config, list[str]], None]  # ValueError when a file is missing
    resolve: Callable[..., Any]
    deciders: Deciders
    # Full-block traces, judged, into a folder; held-out answers replayed, likewise.
    predictor: Callable[[Config, Path], None]
    motivation: Callable[[Config, Path, str | None], None]


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
        if self.name in SERVED:
            if self.name == "slo":
                points = f"{self.config.slo.rates or 'probed'} requests/s"
            elif folder_name(self.name) == "decode":
                points = f"loads {plan.loads(bench)}"
            else:
                points = f"loads {self.config.stream.loads or bench.loads}"
            what = f"{self.name} at {points}, {bench.rounds} rounds, of "
            if self.endpoint is not None:
                return [f"{what}{bench.arms[0]} at {self.endpoint}"]
            commands = [shlex.join(serve_command(self.config, arm)) for arm in bench.arms]
            return [f"{what}{arm}: {line}" for arm, line in zip(bench.arms, commands, strict=True)]
        if self.name == "acceptance":
            made = AcceptanceBenchmark(self.config, self.out, self.endpoint)
            sets = {name: len(prompts) for name, prompts in made.prompts.items()}
            return [f"acceptance of {drafter} on {sets}" for drafter in made.drafters]
        return [f"{self.name}, seed {bench.seed}, into {self.out}"]

    def check(self, arms: list[str] | None = None) -> None:
        """Find every file that the servers of ``arms`` (default: all) will need."""
        arms = self.config.bench.arms if arms is None else arms
        if self.name in SERVED and self.endpoint is None:
            self.rooms.check_arms(self.config, arms)

    def run(self, begin: Callable[[], None]) -> str:
        """Measure what is missing; ``begin`` is called when nothing stands in the way.

        Returns:
            The command that draws the result; ``{0}`` stands for the target's flag.
        """
        if self.name in SERVED:
            self._served(begin)
        elif self.name == "acceptance":
            made = AcceptanceBenchmark(self.config, self.out, self.endpoint)
            begin()
            made.run()
        elif self.name == "predictor":
            begin()
            self.rooms.predictor(self.config, self.out)
        elif self.name == "motivation":
            begin()
            self.rooms.motivation(self.config, self.out, self.endpoint)
        else:
            replay.run(self.name, self.config, self.out, self.rooms.resolve, self.rooms.deciders)
            begin()
        return DRAWN.get(self.name, f"python plot/{self.name}.py {{0}}")

    def _served(self, begin: Callable[[], None]) -> None:
        made = SERVED[self.name](self.config, self.out, self.endpoint)
        self.check(made.unfinished())
        begin()
        try:
            made.run()
        finally:
            if made.done:  # also of an interrupted run: what is there is shown
                if isinstance(made, SloBenchmark):
                    attainment.summarize_folder(self.out, self.config.slo)
                else:
                    compare.summarize_folder(self.out)
