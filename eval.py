#!/usr/bin/env python3
"""Benchmark served arms and leave typed records behind.

    python eval.py --target smollm2 --arm ar,forespark --limit 8 bench.rounds=1
    python eval.py --bench e2e          # closed loop of conversations; mathcode: of questions
    python eval.py --bench slo          # open loop, attainment of time limits
    python eval.py --bench acceptance   # whole blocks: what each drafter can do
    python eval.py --bench predictor    # the pre-draft estimate against the previous step
    python eval.py --bench scheduler    # host decision time; like oracle, without a server

Arms are served by serve.py, started and stopped here; --endpoint measures one arm that
already runs (decode: with the barrier scheduler). Run again, what is measured is skipped.
"""

from pathlib import Path
from typing import Any

from forespark import cli


def predictor(config: Any, out: Path) -> None:
    from forespark.bench.workloads import load_prompts
    from forespark.calibration.run import predictor_quality
    from forespark.serving.collect import full_blocks
    from forespark.serving.launch import enter_engine_environment

    enter_engine_environment(config)
    paths, key, calibration = full_blocks(config, out, load_prompts)
    settings = {name: getattr(config.calibrate, name) for name in ("bins", "min_samples")}
    print(predictor_quality(paths, key, calibration, out, **settings))


def motivation(config: Any, out: Path, endpoint: str | None) -> None:
    from forespark.training.motivation import measure

    # Its rows are the corpus's, which the training section counts.
    config.train.limit = config.bench.limit or config.train.limit
    measure(config, out, endpoint)


def main() -> None:
    flags = ("target", "bench", "arm", "limit", "endpoint", "out", "dry-run")
    args, config = cli.stage("eval", __doc__, *flags)
    from forespark.bench.stage import Rooms, Stage, folder_name
    from forespark.serving.artifacts import check_arms, resolve
    from forespark.serving.deciders import step_deciders

    out = args.out or Path(config.run_dir) / "bench" / folder_name(args.bench)
    rooms = Rooms(check_arms, resolve, step_deciders, predictor, motivation)
    stage = Stage(args.bench, config, out, args.endpoint, rooms)
    if args.dry_run:
        cli.plan(stage.steps(), config=config)
        stage.check()
        return
    after = stage.run(lambda: cli.save_config(config, out))
    cli.done(out, after.format(f"--target {config.target.name}"))


if __name__ == "__main__":
    cli.run(main)
