"""Made-up prices that make drafting worth while, so that a test has drafts to check."""

from __future__ import annotations

from pathlib import Path

from forespark import config as configuration
from forespark import record
from forespark.serving.artifacts import latency_key


def write(folder: Path) -> None:
    """``latency.json`` for the shipped drafter, whatever machine this is."""
    tokens, batch = [1, 64, 512], [1, 64]
    record.write_json(
        folder / "latency.json",
        {
            "schema": 1,
            "key": latency_key(configuration.load(["target=smollm2", f"run_dir={folder}"])),
            "draft": {"tokens": tokens, "ms": [5.0 + 0.05 * t for t in tokens]},
            "verify": {"batch": batch, "per_request": [0, 7], "ms": [[50, 52], [90, 200]]},
            "other": {"batch": batch, "ms": [1.0, 1.5]},
        },
    )
