"""Benchmark records as tables for figures. Reads files only, computes means only.

Ratios and their intervals come from ``summary.json``, which the benchmark writes beside
its records; one that belongs to other records is not used.
"""

from __future__ import annotations

import argparse
import math
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
_MEASURED = ("load", "round", "throughput_tokens_per_s", "interactivity_tokens_per_s")
_OPTIONAL = (*_COUNTS, *_PARTS, "decode_steps", "request_steps")
_NEEDED = ("arm", *_MEASURED, "timed_tokens")
_MATCH = ("ratio", "interactivity_tokens_per_s", "throughput_tokens_per_s",
          "base_throughput_tokens_per_s")  # fmt: skip
TARGETS = Path(__file__).resolve().parent.parent / "configs" / "target"


LOADED = ("decode", "e2e", "mathcode")  # benchmarks that measure arms at loads


def parse(
    description: str | None,
    folder: str = "bench/decode",
    files: str = RECORDS,
    benches: tuple[str, ...] = (),
) -> tuple[Path, Path, str]:
    """Command line of every figure: (folder of records, output folder, target).

    Args:
        benches: what --bench may choose the default folder of; none: no such flag.

    Raises:
        ValueError: unknown target, or a named folder of records that is not there. The
            default folder may be missing: then nothing is measured yet.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2", help="target whose run is drawn")
    if benches:
        parser.add_argument("--bench", default=benches[0], choices=benches,
                            help="benchmark whose records are drawn")  # fmt: skip
    parser.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help=f"folder of {files} (default: runs/TARGET/{folder})",
    )
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder of the figures (default: runs/TARGET/figures)")  # fmt: skip
    args = parser.parse_args()
    known = sorted(path.stem for path in TARGETS.glob("*.yaml"))
    if args.target not in known:
        raise ValueError(f"unknown target {args.target!r}: want one of {', '.join(known)}")
    if args.records is not None and not args.records.is_dir():
        raise ValueError(f"--records {args.records}: no such folder; want one of {files}")
    if benches:
        folder = f"bench/{args.bench}"
    records = args.records or Path("runs") / args.target / folder
    return records, args.out or Path("runs") / args.target / "figures", args.target


def named(stem: str, folder: Path, frame: pd.DataFrame) -> tuple[str, str]:
    """(file name of a figure, name of its benchmark): decode's figures are just ``stem``.

    A folder called decode_X holds a variant of the decode benchmark, and so do its figures.
    """
    bench = str(frame["bench"].iloc[0]) if "bench" in frame and len(frame) else folder.name
    if folder.name.startswith("decode_"):
        bench = folder.name
    ending = "" if bench == "decode" else f"_{bench.removeprefix('decode_')}"
    return (stem + ending if bench in LOADED or "decode_" in bench else stem), bench


def run(main: Callable[[], None]) -> None:
    """Call ``main``; bad records become one line on stderr and exit code 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def read(folder: Path) -> pd.DataFrame:
    """One row per batch; empty with the right columns when nothing is measured yet.

    Raises:
        ValueError: unknown schema, missing fields or values of another type; names file,
            line and field.
    """
    path = folder / RECORDS
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        _check(row, f"{path}, line {number}")
    frame = pd.DataFrame(rows, columns=None if rows else list(_NEEDED))
    for column in _OPTIONAL:
        values = frame[column] if column in frame else pd.Series(dtype=float, index=frame.index)
        frame[column] = pd.to_numeric(values)
    timed = pd.Series([sum(tokens) for tokens in frame["timed_tokens"]], dtype=float)
    # Counters of a window are over all of its tokens, of requests that go on after it, too.
    window = frame.get("window_tokens", timed)
    frame["tokens"] = pd.to_numeric(window).fillna(timed)
    return frame


def _check(row: Any, where: str) -> None:
    require(isinstance(row, dict), where, row, "one object a line")
    if row.get("schema") != SCHEMA:
        raise ValueError(f"{where}: got schema {row.get('schema')!r}, this version reads {SCHEMA}")
    if missing := [name for name in _NEEDED if name not in row]:
        raise ValueError(f"{where}: missing fields {missing}")
    require(isinstance(row["arm"], str), f"{where}: arm", row["arm"], "a name")
    for name in _MEASURED:
        require(is_number(row[name]), f"{where}: {name}", row[name], "a number")
    for name in _OPTIONAL:
        value = row.get(name)
        require(value is None or is_number(value), f"{where}: {name}", value, "a number or null")
    tokens = row["timed_tokens"]
    counts = isinstance(tokens, list) and all(map(is_number, tokens))
    require(counts, f"{where}: timed_tokens", tokens, "a list of numbers")


def is_number(value: Any) -> bool:
    """A finite JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require(ok: bool, what: str, got: Any, want: str) -> None:
    """Raise ValueError, naming both, unless ``ok``."""
    if not ok:
        raise ValueError(f"{what}: got {got!r}, want {want}")


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
    """``summary.json`` of exactly these records, or None with a hint on stderr.

    Raises:
        ValueError: the file is not a summary; names file and field.
    """
    path, records = folder / SUMMARY, folder / RECORDS
    if not records.exists():
        return None
    hint = f"run `python -m forespark.bench.compare {folder}`"
    if not path.exists():
        print(f"{path}: no such file, so there are no ratios; {hint}", file=sys.stderr)
        return None
    found = read_json(path)
    require(isinstance(found, dict), str(path), found, f"an object; {hint}")
    if found.get("records_sha256") != file_sha256(records):
        print(f"{path}: made from other records, so not used; {hint}", file=sys.stderr)
        return None
    _check_summary(found, str(path), hint)
    return dict(found)


def _check_summary(found: dict[str, Any], path: str, hint: str) -> None:
    def check(ok: bool, name: str, got: Any, want: str) -> None:
        require(ok, f"{path}: {name}", got, f"{want}; {hint}")

    pairs, same = found.get("pairs"), found.get("same_outputs_as_ar")
    check(isinstance(pairs, list), "pairs", pairs, "a list")
    best = {"best_over_strongest": (found.get("best_over_strongest", "nothing"), _MATCH)}
    for index, pair in enumerate(pairs or []):
        name = f"pairs[{index}]"
        check(_has(pair, ("arm", "base", "loads", "best")), name, pair, "arm, base, loads, best")
        loads = pair["loads"].values() if isinstance(pair["loads"], dict) else [None]
        ratios = ("throughput_ratio", "throughput_interval")
        check(all(_has(load, ratios) for load in loads), f"{name}.loads", pair["loads"],
              f"loads with {', '.join(ratios)}")  # fmt: skip
        best[f"{name}.best"] = (pair["best"], (*_MATCH, "interval"))
    for name, (match, keys) in best.items():
        check(match is None or _has(match, keys), name, match, f"null or {', '.join(keys)}")
    counts = same.values() if isinstance(same, dict) else [None]
    check(all(_has(count, ("same", "requests")) for count in counts), "same_outputs_as_ar", same,
          "arms with same, requests")  # fmt: skip


def _has(value: Any, keys: tuple[str, ...]) -> bool:
    return isinstance(value, dict) and set(keys) <= value.keys()
