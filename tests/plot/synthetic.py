"""Made-up records for tests of figures. Never measurements: they live in temporary folders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from forespark.record import append_jsonl

ARMS = ("ar", "dflash2", "dspark", "forespark_nojs", "forespark")
GAIN = {"ar": 1.0, "dflash2": 1.5, "dspark": 1.35, "forespark_nojs": 1.45, "forespark": 1.6}
PENALTY = {"ar": 0.0, "dflash2": 0.02, "dspark": 0.008, "forespark_nojs": 0.009,
           "forespark": 0.004}  # fmt: skip


def write(
    folder: Path,
    *,
    arms: tuple[str, ...] = ARMS,
    loads: tuple[int, ...] = (1, 4, 16, 32, 64),
    rounds: int = 3,
    steps: bool = True,
) -> Path:
    """Write records.jsonl; speculation gains at low load and costs at high load."""
    rng = random.Random(0)
    for round_index in range(rounds):
        for arm in arms:
            for load in loads:
                append_jsonl(folder / "records.jsonl", row(arm, load, round_index, rng, steps))
    return folder


def row(arm: str, load: int, round_index: int, rng: random.Random, steps: bool) -> dict[str, Any]:
    ar_step_s = 0.085 + 0.005 * load
    noise = rng.uniform(0.97, 1.03)
    rate = noise * GAIN[arm] / (1 + PENALTY[arm] * load * GAIN[arm]) / ar_step_s
    drafts = arm != "ar"
    tokens = 128 * load
    return {
        "schema": 1, "bench": "decode", "run_id": "synthetic", "target": "smollm2", "arm": arm,
        "load": load, "round": round_index, "batch": 0, "prompt_ids": ["p"] * load,
        "timed_tokens": [128] * load, "span_s": [128 / rate] * load, "ends": ["length"] * load,
        "output_sha256": ["same"] * load, "throughput_tokens_per_s": rate * load,
        "interactivity_tokens_per_s": rate, "wall_s": 128 / rate, "ttft_s_p50": 0.5,
        "drafted_tokens": int(tokens * 2.1) if drafts else None,
        "verified_tokens": int(tokens * 1.4) if drafts else None,
        "accepted_tokens": int(tokens * 0.4) if drafts else None,
        "decode_steps": 80 if steps else None,
        "request_steps": int(tokens / GAIN[arm]) if steps else None,
        "verify_ms": 80.0 + load if steps else None,
        "draft_ms": 12.0 + 0.5 * load if steps and drafts else None,
        "other_ms": 5.0 + 0.05 * load if steps else None,
    }  # fmt: skip
