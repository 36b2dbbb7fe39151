"""Check on a real run that ForeSpark pays for exactly what it plans, load by load.

    python scripts/bench/trace_check.py [--target NAME] [--out FILE] [key=value ...]

Serves benchmark prompts with the ``forespark`` arm in this process, one load after the
other, and compares every step's trace record with what happened: the rows that left the
drafter's forward pass with the sum of d_i + 1 over the drafted requests, and the draft
tokens verified, summed over requests, with B. Writes a JSON record; exits with 1 when a
step disagrees, or when the mean draft length grows with load.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from forespark import config as configuration  # noqa: E402
from forespark import record  # noqa: E402
from forespark.bench.workloads import load_prompts  # noqa: E402

ANSWER_TOKENS = 64


@dataclass
class Witness:
    """What each step really did, noted beside the trace.

    Attributes:
        processed: rows that the drafter's forward returned, 0 when it did not run.
        lengths: sum of d_i + 1 over requests with d_i >= 1, from the lengths on the device.
        verified: draft tokens verified, summed over requests.
    """

    processed: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)

    def watch(self, runner: Any) -> None:
        speculator = runner.speculator
        propose, forward = speculator.propose, speculator._run_model
        rows = [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            hidden = forward(*args, **kwargs)
            rows[0] += int(hidden.shape[0])
            return hidden

        def noted(*args: Any, **kwargs: Any) -> Any:
            rows[0] = 0
            tokens = propose(*args, **kwargs)
            lengths = speculator.last.lengths
            self.processed.append(rows[0])
            self.lengths.append(int((lengths + (lengths > 0)).sum()))
            manager = runner.adaptive_verification
            self.verified.append(int(manager.verified.sum()))
            manager.verified = manager.verified[:0]  # a step without drafts leaves it alone
            return tokens

        speculator.propose, speculator._run_model = noted, counted

    def clear(self) -> None:
        for kept in (self.processed, self.lengths, self.verified):
            kept.clear()


def check_load(engine: Any, witness: Witness, requests: list[Any], load: int) -> dict[str, Any]:
    """Run ``requests`` at one load; its record."""
    engine.clear()
    witness.clear()
    engine.run(requests, load)
    steps = engine.steps
    tokens = [row["drafter_tokens"] for row in steps]
    full = [row for row in steps if row["n"] == load and row["prefill"] == 0]

    def differing(seen: list[int], traced: list[int]) -> int:
        return sum(a != b for a, b in zip(seen, traced, strict=True))

    return {
        "load": load,
        "steps": len(steps),
        "drafter_tokens": sum(tokens),
        "B": sum(row["B"] for row in steps),
        "steps_where_drafter_processed_other_tokens": differing(witness.processed, tokens),
        "steps_where_lengths_sum_to_other_tokens": differing(witness.lengths, tokens),
        "steps_where_verified_is_not_B": differing(witness.verified, [r["B"] for r in steps]),
        "mean_draft_length": round(sum(r["drafted"] for r in full) / (load * len(full)), 4),
    }


def run(config: configuration.Config) -> list[dict[str, Any]]:
    from forespark.serving.inprocess import Request, open_engine

    bench, loads = config.bench, []
    with open_engine(config) as engine:
        witness = Witness()
        witness.watch(engine.runner)
        chats = [p.chat() for p in load_prompts(bench.prompts, seed=bench.seed, limit=256)]
        ids = [found for chat in chats if len(found := engine.chat_ids(chat)) <= 256]
        for load in bench.loads:
            requests = [Request(p, ANSWER_TOKENS, ignore_eos=True) for p in ids[: max(load, 4)]]
            loads.append(check_load(engine, witness, requests, load))
            print(loads[-1], flush=True)
    return loads


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2", help="target model (default: smollm2)")
    parser.add_argument("--out", type=Path, help="record to write")
    args, overrides = parser.parse_known_args()
    config = configuration.load([f"target={args.target}", "arm=forespark", *overrides])
    from forespark.serving.launch import enter_engine_environment

    enter_engine_environment(config)
    loads = run(config)
    wrong = sum(value for row in loads for key, value in row.items() if key.startswith("steps_"))
    lengths = [row["mean_draft_length"] for row in loads]
    falls = all(a >= b for a, b in zip(lengths, lengths[1:], strict=False))
    out = args.out or Path(config.run_dir) / "trace_check.json"
    record.write_json(
        out,
        {"loads": loads, "steps_that_disagree": wrong, "length_falls_with_load": falls,
         "provenance": record.provenance()},
    )  # fmt: skip
    print(out)
    return int(wrong > 0 or not falls)


if __name__ == "__main__":
    sys.exit(main())
