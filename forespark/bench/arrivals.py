"""When requests of the open loop arrive: a seeded Poisson process, or a recorded trace.

Both are exact in count, and the same seed gives every arm the same arrivals; at another rate
the same pattern is only stretched.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np

POISSON = "poisson"


def arrival_times(kind: str, rate: float, count: int, seed: int) -> list[float]:
    """Seconds of ``count`` arrivals, the first at 0, at a mean rate of ``rate`` per second.

    Args:
        kind: ``poisson``, or ``file:PATH`` of JSON lines with ``t_s`` (also ``.gz``); a trace
            shorter than ``count`` begins anew, and ``seed`` says where in it to start.

    Raises:
        ValueError: the trace cannot be read or has fewer than two arrivals.
    """
    assert rate > 0 and count >= 1
    rng = np.random.default_rng(seed)
    if kind == POISSON:
        gaps = rng.exponential(size=count - 1)
    else:
        recorded = np.diff(read_trace(kind.removeprefix("file:")))
        recorded = recorded / recorded.mean()
        start = int(rng.integers(len(recorded)))
        gaps = np.resize(np.roll(recorded, -start), count - 1)
    return [0.0, *(float(t) for t in np.cumsum(gaps) / rate)]


def read_trace(path: str) -> np.ndarray:
    """Arrival times (seconds, ascending) of a recorded trace.

    Raises:
        ValueError: no such file, a line without a finite ``t_s``, or all at one time.
    """
    name = Path(path).expanduser()
    if not name.is_file():
        raise ValueError(f"slo.arrivals: {name}: no such file")
    opener = gzip.open if name.suffix == ".gz" else open
    times = []
    try:
        with opener(name, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    times.append(_time(line, f"{name}, line {number}"))
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{name}: not readable as UTF-8 JSON lines ({error})") from None
    if len(times) < 2 or min(times) == max(times):
        raise ValueError(f"{name}: want two or more arrivals at different times")
    return np.sort(np.array(times))


def _time(line: str, where: str) -> float:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    value = row.get("t_s") if isinstance(row, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: want an object with t_s in seconds, got {str(row)[:80]}")
    return float(value)


def counts(rate: float, warmup_s: float, window_s: float) -> tuple[int, int]:
    """Arrivals before the measured ones, and measured ones (at least one)."""
    return round(rate * warmup_s), max(round(rate * window_s), 1)
