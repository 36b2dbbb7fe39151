"""Calibrate both estimators on served runs of a drafter, or the batch-wise arms.

    python calibrate.py --target smollm2 [--limit N] [--drafter forespark|dspark]
    python calibrate.py --target smollm2 calibrate.caps=[bw]

Reads the served drafter and calibration prompts; leaves ``calibration.json`` and the
traces it was fitted on in the run folder and prints the calibration error per position
before and after. With ``calibrate.caps`` it leaves ``caps.json`` instead: every cap is run
at every load, and each load gets its fastest. Interrupted runs resume where they were.
"""

from pathlib import Path

from forespark import cli


def main() -> None:
    args, config = cli.stage("calibrate", __doc__, "target", "drafter", "limit", "out", "dry-run")
    config.arm.name = config.arm.drafter = args.drafter
    settings, out = config.calibrate, args.out or Path(config.run_dir)
    from forespark.serving.artifacts import calibration_key, calibration_name
    from forespark.serving.launch import enter_engine_environment

    key = calibration_key(config, args.drafter)
    path = out / ("caps.json" if settings.caps else calibration_name(args.drafter))
    if args.dry_run:
        cli.plan([f"calibration runs of {key}, fitted into {path}"], config=config)
        return
    enter_engine_environment(config)
    from forespark.calibration.caps import write_caps
    from forespark.calibration.run import calibrate
    from forespark.data.sources import load_prompts
    from forespark.serving.collect import collect_traces
    from forespark.serving.sweep import cap_loads, sweep_caps

    prompts = load_prompts(settings.sources, config, limit=settings.limit)
    chats = [[{"role": "user", "content": prompt.user_turns[0]}] for prompt in prompts]
    if settings.caps:
        runs = out / "traces" / "caps.jsonl"
        measured = sweep_caps(config, chats, runs)
        print(write_caps(runs, measured, settings.caps, cap_loads(config), path))
        cli.done(path, f"python eval.py --target {config.target.name} --arm {settings.caps[0]}")
        return
    folder = out / "traces" / key["drafter_sha256"][:12]
    paths = collect_traces(config, chats, folder)
    grid = {"bins": settings.bins, "grid_points": settings.theta_grid}
    print(calibrate(paths, key, path, **grid, min_samples=settings.min_samples))
    cli.save_config(config, folder)
    cli.done(path, f"python curves.py --target {config.target.name}")


if __name__ == "__main__":
    cli.run(main)
