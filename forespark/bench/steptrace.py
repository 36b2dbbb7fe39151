"""Mean step times of one batch out of the engine's step trace (one JSON line per step)."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SETTLE_S = 2.0  # at most this long for the engine's last lines to reach the file
_PARTS = ("verify_ms", "draft_ms", "other_ms")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means over pure decode steps; prefill steps are another phase and left out."""

    decode_steps: int
    request_steps: int
    verify_ms: float | None
    draft_ms: float | None
    other_ms: float | None


def end_of(path: Path | None) -> int:
    """Bytes in the trace so far; 0 when there is none."""
    return path.stat().st_size if path is not None and path.exists() else 0


def settle(path: Path | None) -> None:
    """Wait until the file stops growing, so that a batch's last steps are counted to it."""
    deadline = time.monotonic() + _SETTLE_S
    size = -1
    while path is not None and size != end_of(path) and time.monotonic() < deadline:
        size = end_of(path)
        time.sleep(0.2)


def step_times(path: Path | None, start: int, end: int | None = None) -> StepTimes | None:
    """Means of the decode steps written after byte ``start``, up to ``end``; None without any.

    Raises:
        ValueError: a complete line is not a JSON object; names file and byte.
    """
    if path is None or end_of(path) <= start:
        return None
    with path.open("rb") as trace:
        trace.seek(start)
        read = trace.read(-1 if end is None else end - start)
        lines = read.split(b"\n")[:-1]  # the last piece is empty or half written
    rows = [_row(line, path, start) for line in lines if line.strip()]
    steps = [row for row in rows if row.get("n", 0) > 0 and not row.get("prefill", 0)]
    if not steps:
        return None
    means = {part: _mean([step.get(part) for step in steps]) for part in _PARTS}
    return StepTimes(len(steps), sum(int(step["n"]) for step in steps), **means)


def _row(line: bytes, path: Path, start: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, after byte {start}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{path}, after byte {start}: want one object per step, got {row!r}")
    return row


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
