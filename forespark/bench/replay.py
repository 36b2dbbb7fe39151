"""The benchmarks that start no server, with the recorded drafts they replay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forespark.bench.oracle import OracleBenchmark
from forespark.bench.recorded import load
from forespark.bench.scheduler import Deciders, SchedulerBenchmark
from forespark.config import Config


def run(
    bench: str, config: Config, out: Path, resolve: Callable[..., Any], deciders: Deciders
) -> None:
    """Run ``scheduler`` or ``oracle`` into ``out``.

    Args:
        resolve: finds an arm's files (the serving room's).
        deciders: host decisions of vLLM and of our serving room.

    Raises:
        ValueError: oracle: no recorded drafts. The scheduler benchmark draws synthetic ones
            then, and its records say so.
    """
    try:
        files = resolve(config, tables=False)
        target = config.target.name
        drafts, costs = load(Path(config.run_dir), files.calibration, files.drafter_sha256, target)
    except ValueError as error:
        if bench == "oracle":
            raise
        print(f"synthetic drafts, since none are recorded: {error}", file=sys.stderr)
        SchedulerBenchmark(config, out, None, None).run(deciders)
        return
    if bench == "oracle":
        OracleBenchmark(config, out, drafts, costs).run()
    else:
        SchedulerBenchmark(config, out, drafts, costs).run(deciders)
