"""Caps of the batch-wise arms: the fastest cap of every load (paper, Appendix B).

Every cap k in 0..K is run at every load; ``caps.json`` keeps the table and, of each load,
its fastest cap. A run is one JSON line, so a stopped sweep resumes by runs:

    {"header": {"schema": 1, "key": {LATENCY_KEY}, ...settings of the sweep}}
    {"arm": str, "load": int, "cap": int, "round": int, "tokens": int, "ms": number}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forespark.record import provenance, read_jsonl, write_json


def fastest_caps(
    rows: Iterable[Mapping[str, Any]],
    arm: str,
    loads: Sequence[int],
    K: int,
) -> dict[str, Any]:
    """Section of one arm in ``caps.json``: loads, their caps, tokens per second.

    Rounds of a point are added up. Equal throughputs go to the smaller cap.

    Raises:
        ValueError: a load lacks one of the caps 0..K, or a run has no tokens or time.
    """
    sums: dict[tuple[int, int], tuple[int, float]] = {}
    for row in rows:
        if row["arm"] == arm:
            tokens, ms = sums.get((row["load"], row["cap"]), (0, 0.0))
            sums[row["load"], row["cap"]] = (tokens + row["tokens"], ms + row["ms"])
    wanted = [(load, cap) for load in sorted(set(loads)) for cap in range(K + 1)]
    missing = [point for point in wanted if min(sums.get(point, (0, 0))) <= 0]
    if missing:
        raise ValueError(
            f"caps of {arm}: no tokens measured at (load, cap) {missing}; run the same command "
            "again, or raise calibrate.cap_prompts"
        )
    rates = {point: 1e3 * sums[point][0] / sums[point][1] for point in wanted}
    table = [[rates[load, cap] for cap in range(K + 1)] for load in sorted(set(loads))]
    caps = [row.index(max(row)) for row in table]
    return {"loads": sorted(set(loads)), "caps": caps, "throughput": table}


def write_caps(
    runs: Path,
    key: Mapping[str, Any],
    arms: Sequence[str],
    loads: Sequence[int],
    out: Path,
) -> str:
    """Choose caps from measured runs and write ``caps.json``; returns the table as text.

    Args:
        runs: the sweep's JSON lines, header first; arms measured earlier are kept.
        key: LATENCY_KEY fields of the engine that was measured.

    Raises:
        ValueError: a point of an arm in ``arms`` is missing.
    """
    rows = [row for row in read_jsonl(runs) if "header" not in row]
    K = int(key["K"])
    sections = {arm: fastest_caps(rows, arm, loads, K) for arm in arms}
    for arm in sorted({row["arm"] for row in rows} - set(arms)):
        try:
            sections[arm] = fastest_caps(rows, arm, loads, K)
        except ValueError:
            continue  # a sweep that was stopped; its own command completes it
    write_json(out, {"schema": 1, "key": dict(key), **sections, "provenance": provenance()})
    return "\n".join(line for arm in arms for line in _report(arm, sections[arm], K))


def _report(arm: str, section: Mapping[str, Any], K: int) -> list[str]:
    head = "".join(f"{f'k={cap}':>9}" for cap in range(K + 1))
    lines = [f"{arm}: tokens per second by load and cap", f"{'load':>6}{head}  fastest"]
    for load, cap, row in zip(*(section[p] for p in ("loads", "caps", "throughput")), strict=True):
        cells = "".join(f"{value:9.1f}" for value in row)
        lines.append(f"{load:6d}{cells}  k={cap}")
    return lines
