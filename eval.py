#!/usr/bin/env python3
"""Benchmark served arms and leave typed records behind.

    python eval.py --target smollm2 --bench decode
    python eval.py --bench decode --arm ar,forespark --limit 8 bench.rounds=1

Each arm is served by serve.py, started and stopped here; with --endpoint, one arm that
already runs (with the barrier scheduler) is measured instead. Run again, finished batches
are skipped.
"""

from pathlib import Path

from forespark import cli


def main() -> None:
    flags = ("target", "bench", "arm", "limit", "endpoint", "out", "dry-run")
    args, config = cli.stage("eval", __doc__, *flags)
    out = args.out or Path(config.run_dir) / "bench" / args.bench
    from forespark.bench import plan

    loads = plan.loads(config.bench)
    if args.dry_run:
        rounds = config.bench.rounds
        cli.plan(
            [
                f"{args.bench} of {arm} at loads {loads}, {rounds} rounds"
                for arm in config.bench.arms
            ]
        )
        return
    from forespark.bench.compare import summarize_folder
    from forespark.bench.decode import DecodeBenchmark

    benchmark = DecodeBenchmark(config, out, args.endpoint)
    cli.save_config(config, out)
    try:
        benchmark.run()
    finally:
        summarize_folder(out)  # also of an interrupted run: what is there is shown
    name = config.target.name
    cli.done(out, f"python plot/pareto.py --target {name}; python plot/table.py --target {name}")


if __name__ == "__main__":
    cli.run(main)
