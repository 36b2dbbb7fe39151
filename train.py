"""Train a drafter: DFlash 2 with ForeSpark's estimators, or DSpark.

    python train.py --target smollm2 --drafter forespark [--max-steps N] [train.KEY=VALUE ...]

Reads RUN_DIR/corpus (or train.data=[...]), leaves RUN_DIR/drafters/<drafter>/ and, to
resume from, RUN_DIR/train/<drafter>/ with the learning curve metrics.jsonl. SIGTERM stops
after the current step with a checkpoint; the same command then continues. With
train.processes=N it starts N ranks by torchrun, one per GPU.
"""

import os
import shlex
import sys

from forespark import cli

# Waiting threads sleep instead of spinning, so a busy machine is not slowed further.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    args, config = cli.stage(
        "train", __doc__, "target", "drafter", "limit", "max-steps", "out", "endpoint", "dry-run"
    )
    from forespark.training.run import launch_command, run

    command = launch_command(config, [word for word in sys.argv if word != "--dry-run"])
    launch = [] if command is None else [shlex.join(command)]
    if args.dry_run:
        sources = config.train.data or [f"{config.run_dir}/corpus"]
        needed = [*sources, config.target.model]
        cli.plan([f"train {args.drafter} on {', '.join(sources)}", *launch], needed, config)
        return
    if command is not None:
        os.execv(command[0], command)

    out = run(config, args.drafter, args.out, args.endpoint)
    cli.save_config(config, out)
    cli.done(out, f"python calibrate.py --target {config.target.name}")


if __name__ == "__main__":
    cli.run(main)
