"""Raw step timings to ``latency.json`` to price tables (Appendix B, Latency tables).

Raw file, JSON lines, appended by the profiler; every run starts with a header:

    {"kind": "header", "key": {LATENCY_KEY fields}}
    {"kind": "draft", "tokens": packed drafter tokens, "ms": x}
    {"kind": "verify", "batch": requests, "per_request": drafts verified each, "ms": x}
    {"kind": "other", "batch": requests, "ms": x}

A price is the median of its samples. A point with too few samples is left out with a
warning; for verification its whole batch size is, since the table must be a full grid.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forespark.fore_d.costs import LATENCY_KEY, CostTables, check_key
from forespark.record import provenance, read_json, read_jsonl, write_json

COMMAND = "python curves.py"
_FIELDS = {"draft": ("tokens",), "verify": ("batch", "per_request"), "other": ("batch",)}


def read_timings(
    path: Path,
    wanted: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, dict[tuple[int, ...], list[float]]]]:
    """(key, samples by kind and point) of a raw file.

    Raises:
        ValueError: no header, headers of different engines, an unknown kind or a
            measurement that is not a finite number >= 0; names file and line.
    """
    samples: dict[str, dict[tuple[int, ...], list[float]]] = {kind: {} for kind in _FIELDS}
    key: dict[str, Any] | None = None
    rows = read_jsonl(path) if Path(path).exists() else []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        kind = row.get("kind")
        if kind == "header":
            check_key(row["key"], key or wanted or {}, what=f"{where}: timings")
            key = dict(row["key"])
            continue
        if key is None or kind not in _FIELDS:
            raise ValueError(
                f"{where}: got kind {kind!r} {'before' if key is None else 'after'} "
                f"the header; want one of {tuple(_FIELDS)} after it. Delete the file"
            )
        ms = row.get("ms")
        if not isinstance(ms, int | float) or not math.isfinite(ms) or ms < 0:
            raise ValueError(f"{where}: ms is {ms!r}, want a finite number >= 0")
        samples[kind].setdefault(tuple(int(row[f]) for f in _FIELDS[kind]), []).append(float(ms))
    if key is None:
        raise ValueError(f"{path}: no timings; run `{COMMAND}`")
    return key, samples


def summarise(
    key: Mapping[str, Any],
    samples: Mapping[str, Mapping[tuple[int, ...], Sequence[float]]],
    min_samples: int = 30,
    stepwise: bool = False,
    verify_buckets: Sequence[int] = (),
) -> dict[str, Any]:
    """Content of ``latency.json``; checked by building the price tables from it.

    Args:
        stepwise: draft points are graph sizes (CUDA).
        verify_buckets: graph sizes of the target, tokens (CUDA).

    Raises:
        ValueError: nothing usable is left, or the key lacks a field.
    """
    missing = [name for name in LATENCY_KEY if name not in key]
    if missing:
        raise ValueError(f"timings: the key lacks {missing}; measure again with `{COMMAND}`")
    draft = _medians(samples["draft"], "draft", min_samples)
    other = _medians(samples["other"], "other", min_samples)
    batches, each, grid = _grid(_medians(samples["verify"], "verify", min_samples))
    record: dict[str, Any] = {
        "schema": 1,
        "key": dict(key),
        "draft": {
            "tokens": [p[0] for p in draft],
            "ms": list(draft.values()),
            "stepwise": stepwise,
        },
        "verify": {
            "batch": batches,
            "per_request": each,
            "ms": grid,
            "buckets": list(verify_buckets),
        },
        "other": {"batch": [p[0] for p in other], "ms": list(other.values())},
    }
    CostTables.from_record(record, source="measured timings")
    _warn_if_flat("draft", record["draft"]["tokens"], record["draft"]["ms"])
    _warn_if_flat("verify", each, grid[-1])
    return record


def _warn_if_flat(kind: str, sizes: Sequence[int], ms: Sequence[float]) -> None:
    """Identical times at 1x and 8x the work mean the forced size never took effect."""
    if sizes[-1] >= 8 * max(sizes[0], 1) and ms[-1] < 1.01 * ms[0]:
        warnings.warn(
            f"{kind} timings: {sizes[0]} and {sizes[-1]} tokens take {ms[0]:.3g} and "
            f"{ms[-1]:.3g} ms; check that the forced length reaches the engine",
            stacklevel=3,
        )


def _medians(
    points: Mapping[tuple[int, ...], Sequence[float]], kind: str, min_samples: int
) -> dict[tuple[int, ...], float]:
    short = [f"{p} has {len(s)}" for p, s in sorted(points.items()) if len(s) < min_samples]
    if short:
        warnings.warn(
            f"{kind} timings: left out {', '.join(short)}; want {min_samples} samples",
            stacklevel=3,
        )
    return {
        p: statistics.median(s) for p, s in sorted(points.items()) if len(s) >= max(min_samples, 1)
    }


def _grid(
    points: Mapping[tuple[int, ...], float],
) -> tuple[list[int], list[int], list[list[float]]]:
    """Batch sizes measured at every per-request length, those lengths, and the prices."""
    each = sorted({p[1] for p in points})
    batches = []
    for batch in sorted({p[0] for p in points}):
        holes = [v for v in each if (batch, v) not in points]
        if holes:
            warnings.warn(
                f"verify timings: left out batch {batch}, not measured at {holes} drafts each",
                stacklevel=3,
            )
        else:
            batches.append(batch)
    return batches, each, [[points[(b, v)] for v in each] for b in batches]


def write_latency(path: Path, record: Mapping[str, Any]) -> None:
    """Write ``latency.json`` atomically, with provenance."""
    write_json(path, {**record, "provenance": provenance()})


def read_latency(path: Path, wanted: Mapping[str, Any] | None = None) -> CostTables:
    """Price tables of a ``latency.json``; ``wanted`` is the engine's key (None: any).

    Raises:
        ValueError: missing or damaged file, or tables of another engine; names the
            field and the command to run.
    """
    path = Path(path)
    if not path.exists():
        target = f" --target {wanted['target']}" if wanted and "target" in wanted else ""
        raise ValueError(f"{path}: no latency tables; run `{COMMAND}{target}`")
    return CostTables.from_record(read_json(path), wanted, source=str(path))


def points_missing(
    samples: Mapping[str, Mapping[tuple[int, ...], Sequence[float]]],
    kind: str,
    points: Iterable[tuple[int, ...]],
    min_samples: int,
) -> list[tuple[int, ...]]:
    """Points of a sweep that still need samples: what a resumed profiler measures."""
    return [p for p in points if len(samples[kind].get(p, ())) < min_samples]
