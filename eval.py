#!/usr/bin/env python3
"""Benchmark served arms and leave typed records behind.

    python eval.py --target smollm2 --arm ar,forespark --limit 8 bench.rounds=1
    python eval.py --bench scheduler    # host decision time; like oracle, without a server

Arms are served by serve.py, started and stopped here; --endpoint measures one arm that
already runs (with the barrier scheduler). Run again, what is measured is skipped.
"""

from pathlib import Path
from typing import Any

from forespark import cli


def decode(args: Any, config: Any, out: Path) -> str:
    from forespark.bench import compare, decode, plan
    from forespark.serving.artifacts import check_arms

    arms = config.bench.arms
    if args.dry_run:
        loads, rounds = plan.loads(config.bench), config.bench.rounds
        cli.plan(f"decode of {arm} at loads {loads}, {rounds} rounds" for arm in arms)
        check_arms(config, [] if args.endpoint else arms)
        return ""
    benchmark = decode.DecodeBenchmark(config, out, args.endpoint)
    check_arms(config, [] if args.endpoint else benchmark.unfinished())
    cli.save_config(config, out)
    try:
        benchmark.run()
    finally:
        if benchmark.done:  # also of an interrupted run: what is there is shown
            compare.summarize_folder(out)
    return "python plot/pareto.py {0}; python plot/table.py {0}"


def offline(args: Any, config: Any, out: Path) -> str:
    from forespark.bench import replay
    from forespark.serving import artifacts, deciders

    if args.dry_run:
        cli.plan([f"{args.bench}, seed {config.bench.seed}, into {out}"])
        return ""
    replay.run(args.bench, config, out, artifacts.resolve, deciders.step_deciders)
    cli.save_config(config, out)
    return f"python plot/{args.bench}.py {{0}}"


def main() -> None:
    flags = ("target", "bench", "arm", "limit", "endpoint", "out", "dry-run")
    args, config = cli.stage("eval", __doc__, *flags)
    out = args.out or Path(config.run_dir) / "bench" / args.bench
    after = (decode if args.bench == "decode" else offline)(args, config, out)
    if after:
        cli.done(out, after.format(f"--target {config.target.name}"))


if __name__ == "__main__":
    cli.run(main)
