"""Trace file of an engine: a header line, then one JSON line per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forespark import record


class TraceWriter:
    """Appends step records; starts a new file when the header differs.

    Args:
        path: trace file.
        settings: ``additional_config["forespark"]``.
        K: largest draft length.
    """

    def __init__(self, path: Path, settings: dict[str, Any], K: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "target": settings["target"],
            "arm": settings["arm"],
            "drafter_sha256": settings["drafter_sha256"],
            "K": K,
            "force_length": settings["force_length"],
            "device": record.device_name(),
        }
        self._file = path.open("w", encoding="utf-8")
        self.write({"header": header})

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
