"""Benchmark records as tables for figures. Reads files only, computes means only.

Ratios and their intervals come from ``summary.json``, which the benchmark writes beside
its records; one that belongs to other records is not used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from forespark.record import file_sha256, read_json, read_jsonl

SCHEMA = 1
RECORDS = "records.jsonl"
SUMMARY = "summary.json"
_COUNTS = ("drafted_tokens", "verified_tokens", "accepted_tokens")
_PARTS = ("verify_ms", "draft_ms", "other_ms")
_NEEDED = ("arm", "load", "round", "throughput_tokens_per_s", "interactivity_tokens_per_s",
           "timed_tokens")  # fmt: skip


def parse(
    description: str | None, folder: str = "bench/decode", files: str = RECORDS
) -> tuple[Path, Path, str]:
    """Command line of every figure: (folder of records, output folder, target)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2", help="target whose run is drawn")
    parser.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help=f"folder of {files} (default: runs/TARGET/{folder})",
    )
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder of the figures (default: runs/TARGET/figures)")  # fmt: skip
    args = parser.parse_args()
    records = args.records or Path("runs") / args.target / folder
    return records, args.out or Path("runs") / args.target / "figures", args.target


def run(main: Callable[[], None]) -> None:
    """Call ``main``; bad records become one line on stderr and exit code 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")


def read(folder: Path) -> pd.DataFrame:
    """One row per batch; empty with the right columns when nothing is measured yet.

    Raises:
        ValueError: unknown schema or missing fields; names file and line.
    """
    path = folder / RECORDS
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        if row.get("schema") != SCHEMA:
            raise ValueError(f"{path}, line {number}: got schema {row.get('schema')!r}, "
                             f"this version reads {SCHEMA}")  # fmt: skip
        if missing := [name for name in _NEEDED if name not in row]:
            raise ValueError(f"{path}, line {number}: missing fields {missing}")
    frame = pd.DataFrame(rows, columns=None if rows else list(_NEEDED))
    for column in (*_COUNTS, *_PARTS, "decode_steps", "request_steps"):
        values = frame[column] if column in frame else pd.Series(dtype=float, index=frame.index)
        frame[column] = pd.to_numeric(values)
    frame["tokens"] = [sum(tokens) for tokens in frame["timed_tokens"]]
    return frame


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per (arm, load): batches averaged within rounds, rounds averaged.

    Columns: arm, load, rounds, throughput, throughput_min, throughput_max, interactivity
    (tokens/s), tokens, drafted_tokens, verified_tokens, accepted_tokens, decode_steps,
    request_steps (sums; NaN when not measured), verify_ms, draft_ms, other_ms (means per
    decode step).
    """
    rows = []
    for (arm, load), group in frame.groupby(["arm", "load"], sort=True):
        rounds = group.groupby("round")
        throughput = rounds["throughput_tokens_per_s"].mean()
        row: dict[str, Any] = {
            "arm": arm,
            "load": load,
            "rounds": len(throughput),
            "throughput": throughput.mean(),
            "throughput_min": throughput.min(),
            "throughput_max": throughput.max(),
            "interactivity": rounds["interactivity_tokens_per_s"].mean().mean(),
            "tokens": group["tokens"].sum(),
        }
        for column in (*_COUNTS, "decode_steps", "request_steps"):
            row[column] = group[column].sum(min_count=len(group))
        for part in _PARTS:
            # Weighted by steps, so that a part's mean is its time over all steps.
            weight = group["decode_steps"].where(group[part].notna())
            row[part] = (group[part] * weight).sum(min_count=1) / weight.sum()
        rows.append(row)
    return pd.DataFrame(rows)


def summary(folder: Path) -> dict[str, Any] | None:
    """``summary.json`` of exactly these records, or None with a hint on stderr."""
    path, records = folder / SUMMARY, folder / RECORDS
    if not records.exists():
        return None
    hint = f"run `python -m forespark.bench.compare {folder}`"
    if not path.exists():
        print(f"{path}: no such file, so there are no ratios; {hint}", file=sys.stderr)
        return None
    found = read_json(path)
    if found.get("records_sha256") != file_sha256(records):
        print(f"{path}: made from other records, so not used; {hint}", file=sys.stderr)
        return None
    return dict(found)
