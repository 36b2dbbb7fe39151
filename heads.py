"""Fit ForeSpark's two estimators on a trained DFlash 2 drafter, which stays as it is.

    python heads.py --target smollm2 --drafter-dir DIR [--out COPY] [--max-steps N]

Reads the checkpoint (speculators' format) and RUN_DIR/corpus; leaves DIR/forespark/heads.*,
or a copy of the checkpoint with them in --out. SIGTERM stops after the current step; the
same command then continues.
"""

import os
from pathlib import Path

from forespark import cli

# Waiting threads sleep instead of spinning, so a busy machine is not slowed further.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    flags = ("target", "drafter-dir", "limit", "max-steps", "out", "endpoint", "dry-run")
    args, config = cli.stage("heads", __doc__, *flags)
    if args.dry_run:
        from forespark.config import drafter_places

        places = drafter_places(config, "forespark")
        folder = next((p for p in places if (p / "config.json").exists()), places[0])
        sources = config.train.data or [f"{config.run_dir}/corpus"]
        needed = [str(folder / name) for name in ("config.json", "model.safetensors")]
        cli.plan([f"estimators of {folder} on {', '.join(sources)}"], [*needed, *sources], config)
        return
    from forespark.training.heads import run

    out = run(config, args.out, args.endpoint)
    cli.save_config(config, out / "forespark" if args.out is None else out)
    where = "" if Path(out) == Path(config.drafter.dir or "") else f" drafter.dir={out}"
    cli.done(out / "forespark", f"python calibrate.py --target {config.target.name}{where}")


if __name__ == "__main__":
    cli.run(main)
