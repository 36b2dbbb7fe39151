"""Time per training iteration of ForeSpark, plain DFlash 2 and DSpark, and their sizes.

    python scripts/bench/training_cost.py --target smollm2 [--max-steps N] [--out DIR]

One interleaved run of N iterations each (default 4 K) on rows of RUN_DIR/corpus; leaves
records.jsonl and run.json in RUN_DIR/bench/training_cost, for plot/training_cost.py. An
otherwise idle machine is wanted: about 15 minutes on two cores.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forespark import cli

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    flags = ("target", "limit", "max-steps", "out", "endpoint")
    args, config = cli.stage("train", __doc__, *flags)
    from forespark.training.cost import measure

    out = args.out or Path(config.run_dir) / "bench" / "training_cost"
    measure(config, out, args.endpoint)
    cli.save_config(config, out)
    cli.done(out, f"python plot/training_cost.py --records {out}")


if __name__ == "__main__":
    cli.run(main)
