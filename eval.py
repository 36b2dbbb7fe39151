#!/usr/bin/env python3
"""Benchmark served arms and leave typed records behind.

    python eval.py --target smollm2 --bench decode
    python eval.py --bench decode --arm ar,forespark --limit 8 bench.rounds=1

Each arm is served by serve.py, started and stopped here; with --endpoint, one arm that
already runs (with the barrier scheduler) is measured instead. Run again, finished batches
are skipped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from forespark import cli


def check_arms(config: Any, names: list[str]) -> None:
    """Find every file the arms need before the first server starts; ValueError names all."""
    from forespark.config import load
    from forespark.serving.artifacts import resolve

    problems = []
    for name in names:
        arm = load([f"target={config.target.name}", f"arm={name}"]).arm
        adaptive = arm.verify == "adaptive"
        try:
            resolve(replace(config, arm=arm), tables=adaptive, calibration=adaptive)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("; ".join(problems))


def main() -> None:
    flags = ("target", "bench", "arm", "limit", "endpoint", "out", "dry-run")
    args, config = cli.stage("eval", __doc__, *flags)
    out = args.out or Path(config.run_dir) / "bench" / args.bench
    from forespark.bench import compare, decode, plan

    after = f"at loads {plan.loads(config.bench)}, {config.bench.rounds} rounds"
    if args.dry_run:
        cli.plan(f"{args.bench} of {arm} {after}" for arm in config.bench.arms)
        check_arms(config, [] if args.endpoint else config.bench.arms)
        return
    benchmark = decode.DecodeBenchmark(config, out, args.endpoint)
    check_arms(config, [] if args.endpoint else benchmark.unfinished())
    cli.save_config(config, out)
    try:
        benchmark.run()
    finally:
        if benchmark.done:  # also of an interrupted run: what is there is shown
            compare.summarize_folder(out)
    target = f"--target {config.target.name}"
    cli.done(out, f"python plot/pareto.py {target}; python plot/table.py {target}")


if __name__ == "__main__":
    cli.run(main)
