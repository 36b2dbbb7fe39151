"""Calibrate both estimators on served runs of a drafter.

    python calibrate.py --target smollm2 [--limit N] [--drafter forespark|dspark]

Reads the served drafter and calibration prompts; leaves ``calibration.json`` and the
traces it was fitted on in the run folder and prints the calibration error per position
before and after. Interrupted runs resume at the draft length they were in.
"""

from pathlib import Path

from forespark import cli


def main() -> None:
    args, config = cli.stage("calibrate", __doc__, "target", "drafter", "limit", "out", "dry-run")
    config.arm.name = config.arm.drafter = args.drafter
    out = args.out or Path(config.run_dir)
    from forespark.serving.artifacts import calibration_key, calibration_name
    from forespark.serving.launch import enter_engine_environment

    key = calibration_key(config, args.drafter)
    path = out / calibration_name(args.drafter)
    if args.dry_run:
        cli.plan([f"calibration runs of {key}, fitted into {path}"])
        return
    enter_engine_environment(config)
    from forespark.calibration.run import calibrate
    from forespark.data.sources import load_prompts
    from forespark.serving.collect import collect_traces

    settings = config.calibrate
    prompts = load_prompts(settings.sources, config, limit=settings.limit)
    chats = [[{"role": "user", "content": prompt.user_turns[0]}] for prompt in prompts]
    folder = out / "traces" / key["drafter_sha256"][:12]
    paths = collect_traces(config, chats, folder)
    print(
        calibrate(
            paths,
            key,
            path,
            bins=settings.bins,
            grid_points=settings.theta_grid,
            min_samples=settings.min_samples,
        )
    )
    cli.save_config(config, folder)
    cli.done(path, f"python curves.py --target {config.target.name}")


if __name__ == "__main__":
    cli.run(main)
