"""Folder of a benchmark that starts no server: its settings, its runs, its rows so far.

As for the decode benchmark, records of one folder can be compared: other settings are
refused as soon as there are records, and a row that is there is not measured again.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from forespark.bench.folder import RUN, read_run
from forespark.bench.records import RECORDS, SCHEMA
from forespark.config import Config
from forespark.fore_d.costs import CostTables
from forespark.record import append_jsonl, provenance, read_jsonl, write_json


def open_folder(
    config: Config, out: Path, bench: str, fixed: dict[str, Any], run_id: str
) -> list[dict[str, Any]]:
    """Add this run to run.json and return the rows of earlier ones.

    Args:
        fixed: settings that make two rows comparable, JSON values.

    Raises:
        ValueError: the folder holds rows of another benchmark, schema or settings.
    """
    path, records = out / RUN, out / RECORDS
    rows = read_jsonl(records) if records.exists() else []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or (row.get("schema"), row.get("bench")) != (SCHEMA, bench):
            raise ValueError(
                f"{records}, line {number}: not a {bench} record of schema {SCHEMA}; use another "
                "--out, or delete the folder"
            )
    earlier: dict[str, Any] = {"fixed": fixed, "runs": []}
    if path.exists():
        earlier = read_run(path)
    there = earlier["fixed"]
    if rows and (wrong := [name for name in fixed if there.get(name) != fixed[name]]):
        values = ", ".join(f"{x} (there {there.get(x)!r}, now {fixed[x]!r})" for x in wrong)
        raise ValueError(
            f"{out} holds records measured with other settings: {values}; use another --out, or "
            "delete the folder"
        )
    run = {"run_id": run_id, "provenance": provenance(), "config": asdict(config)}
    runs = [*earlier["runs"], run]
    write_json(path, {"schema": SCHEMA, "bench": bench, "fixed": fixed, "runs": runs})
    return rows


def digest(*arrays: np.ndarray) -> int:
    """Checksum of what a folder's rows were computed from."""
    return zlib.crc32(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def prices_digest(costs: CostTables) -> int:
    """Checksum of latency tables."""
    return digest(
        costs.draft_tokens, costs.draft_points_ms, costs.verify_batches, costs.verify_per_request,
        costs.verify_points_ms, costs.other_points_ms,
    )  # fmt: skip


def append_row(out: Path, bench: str, run_id: str, target: str, row: dict[str, Any]) -> None:
    """One line of records.jsonl."""
    head = {"schema": SCHEMA, "bench": bench, "run_id": run_id, "target": target}
    append_jsonl(out / RECORDS, {**head, **row})
