"""Measure the latency tables that price drafting and verification.

    python curves.py --target smollm2 [--limit POINTS] [--drafter forespark|dspark]

Reads the served drafter; leaves ``timings.jsonl`` (every measured step) and
``latency.json`` (medians) in the run folder. The tables are valid for this drafter on
this device only; a server started elsewhere refuses them. Resumes point by point.
"""

from pathlib import Path

from forespark import cli


def main() -> None:
    args, config = cli.stage("curves", __doc__, "target", "drafter", "limit", "out", "dry-run")
    config.arm.name = config.arm.drafter = args.drafter
    out = args.out or Path(config.run_dir)
    from forespark.serving.artifacts import latency_key, latency_name
    from forespark.serving.launch import enter_engine_environment
    from forespark.serving.profile import profile_steps

    key = latency_key(config, name=args.drafter)
    path = out / latency_name(args.drafter)
    if args.dry_run:
        cli.plan([f"latency profile of {key} into {path}"], config=config)
        return
    enter_engine_environment(config)
    from forespark.calibration.latency import read_timings, summarise, write_latency

    raw = path.with_name(path.name.replace("latency", "timings") + "l")
    profile_steps(config, raw, config.curves.limit)
    found, samples = read_timings(raw, key)
    least = min(30, config.curves.steps_per_point)
    write_latency(path, summarise(found, samples, min_samples=least))
    cli.save_config(config, out)
    cli.done(path, f"python eval.py --bench decode --target {config.target.name}")


if __name__ == "__main__":
    cli.run(main)
