"""How accepted counts change from step to step, and how drafts depend on their length.

    python scripts/bench/motivation.py --target smollm2 [--limit ROWS] [--out DIR]

Replays the trained drafter on the held-out answers of RUN_DIR/corpus; leaves records.jsonl
and run.json in RUN_DIR/bench/motivation, for plot/motivation.py.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forespark import cli

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    args, config = cli.stage("train", __doc__, "target", "limit", "out", "endpoint")
    from forespark.training.motivation import measure

    out = args.out or Path(config.run_dir) / "bench" / "motivation"
    measure(config, out, args.endpoint)
    cli.save_config(config, out)
    cli.done(out, f"python plot/motivation.py --records {out}")


if __name__ == "__main__":
    cli.run(main)
