"""Trace file of an engine: a header line at every start, then one JSON line per step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from forespark import record


def to_line(row: dict[str, Any]) -> str:
    """One JSON line; a logit that is not finite becomes null, as the readers expect."""
    if "requests" in row:
        row = {**row, "requests": [_finite(request) for request in row["requests"]]}
    return json.dumps(row, allow_nan=False)


def _finite(request: dict[str, Any]) -> dict[str, Any]:
    clean = dict(request)
    for name in ("z", "l"):
        if request[name] is not None:
            clean[name] = [x if math.isfinite(x) else None for x in request[name]]
    return clean


class TraceWriter:
    """Appends step records.

    Args:
        path: trace file; kept and continued when it exists.
        settings: ``additional_config["forespark"]``.
        K: largest draft length.
    """

    def __init__(self, path: Path, settings: dict[str, Any], K: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "schema": 1,
            "target": settings["target"],
            "arm": settings["arm"],
            "drafter": settings["drafter"],
            "drafter_sha256": settings["drafter_sha256"],
            "K": K,
            "force_length": settings["force_length"],
            "device": record.device_name(),
        }
        self._file = path.open("a", encoding="utf-8")
        self.write({"header": header})

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(to_line(row) + "\n")
        self._file.flush()
