#!/usr/bin/env python3
"""Benchmark served arms and leave typed records behind.

    python eval.py --target smollm2 --arm ar,forespark --limit 8 bench.rounds=1
    python eval.py --bench acceptance   # whole blocks: what each drafter can do
    python eval.py --bench scheduler    # host decision time; like oracle, without a server

Arms are served by serve.py, started and stopped here; --endpoint measures one arm that
already runs (decode: with the barrier scheduler). Run again, what is measured is skipped.
"""

from pathlib import Path

from forespark import cli


def main() -> None:
    flags = ("target", "bench", "arm", "limit", "endpoint", "out", "dry-run")
    args, config = cli.stage("eval", __doc__, *flags)
    from forespark.bench.stage import Serving, Stage
    from forespark.serving.artifacts import check_arms, resolve
    from forespark.serving.deciders import step_deciders

    out = args.out or Path(config.run_dir) / "bench" / args.bench
    serving = Serving(check_arms, resolve, step_deciders)
    stage = Stage(args.bench, config, out, args.endpoint, serving)
    if args.dry_run:
        cli.plan(stage.steps())
        stage.check()
        return
    after = stage.run(lambda: cli.save_config(config, out))
    cli.done(out, after.format(f"--target {config.target.name}"))


if __name__ == "__main__":
    cli.run(main)
