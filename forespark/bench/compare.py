"""Arms compared at matched interactivity and at equal load, with bootstrap intervals.

    python -m forespark.bench.compare runs/smollm2/bench/decode

writes summary.json beside records.jsonl; tables and figures read it. Rules (paper,
Section 6.1): throughput is interpolated linearly in log interactivity between adjacent
loads, and only where both arms run at no less than half of their own peak throughput.
Arms that never meet there get no number. Intervals resample rounds, the same rounds for
both arms, because a round met the same machine and the same prompts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forespark.bench.records import RECORDS, LoadRecord, read_records
from forespark.record import file_sha256, write_json

SUMMARY = "summary.json"
HALF = 0.5  # of an arm's own peak
RESAMPLES = 2000
BASES = ("ar", "dspark", "dflash2", "forespark_nojs")
# What "the strongest baseline" is chosen from: forespark_nojs is an ablation of ours.
BASELINES = ("ar", "dspark", "dflash2")
OURS = "forespark"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One (arm, load): means over its batches."""

    load: int
    interactivity: float  # tokens/s of the median user
    throughput: float  # tokens/s of all users


@dataclass(frozen=True, slots=True)
class Match:
    """Both arms at one interactivity (tokens/s per user)."""

    interactivity: float
    throughput: float
    base_throughput: float

    @property
    def ratio(self) -> float:
        return self.throughput / self.base_throughput


Curve = list[CurvePoint]
# arm -> load -> round -> (throughput, interactivity), means over the round's batches
Table = dict[str, dict[int, dict[int, tuple[float, float]]]]


def tabulate(records: Iterable[LoadRecord]) -> Table:
    """Batches averaged within each (arm, load, round)."""
    cells: dict[tuple[str, int, int], list[LoadRecord]] = defaultdict(list)
    for record in records:
        cells[record.arm, record.load, record.round].append(record)
    table: Table = defaultdict(lambda: defaultdict(dict))
    for (arm, load, round_index), rows in sorted(cells.items()):
        table[arm][load][round_index] = (
            float(np.mean([row.throughput_tokens_per_s for row in rows])),
            float(np.mean([row.interactivity_tokens_per_s for row in rows])),
        )
    return {arm: dict(loads) for arm, loads in table.items()}


def curve(loads: dict[int, dict[int, tuple[float, float]]], rounds: Iterable[int]) -> Curve:
    """Points of one arm in order of load, over the given rounds (repetitions count)."""
    points = []
    for load, by_round in sorted(loads.items()):
        values = [by_round[r] for r in rounds if r in by_round]
        if values:
            throughput, interactivity = np.mean(values, axis=0)
            points.append(CurvePoint(load, float(interactivity), float(throughput)))
    return points


def throughput_at(points: Curve, interactivity: float, share_of_peak: float = HALF) -> float | None:
    """Interpolated throughput, or None outside the curve or below half its peak.

    A curve that folds back (noise) has several values at one interactivity; the largest is
    what the arm can deliver there.
    """
    if not points:
        return None
    x = np.log(interactivity)
    floor = share_of_peak * max(point.throughput for point in points)
    found = [p.throughput for p in points if p.interactivity == interactivity]
    for left, right in itertools.pairwise(points):
        a, b = np.log(left.interactivity), np.log(right.interactivity)
        if a != b and min(a, b) <= x <= max(a, b):
            share = (x - a) / (b - a)
            found.append(left.throughput + share * (right.throughput - left.throughput))
    # A rounding error must not exclude a point that lies on the limit.
    found = [value for value in found if value >= floor * (1 - 1e-9)]
    return float(max(found)) if found else None


def _knots(points: Curve) -> list[float]:
    """Interactivities where a ratio of two curves can be largest: points and half-peaks."""
    if not points:
        return []
    floor = HALF * max(point.throughput for point in points)
    knots = [point.interactivity for point in points]
    for left, right in itertools.pairwise(points):
        low, high = sorted((left.throughput, right.throughput))
        if low < floor < high:
            share = (floor - left.throughput) / (right.throughput - left.throughput)
            a, b = np.log(left.interactivity), np.log(right.interactivity)
            knots.append(float(np.exp(a + share * (b - a))))
    return knots


def matched(arm: Curve, base: Curve) -> list[Match]:
    """Both arms at every knot of either curve that both reach; empty means "n/a"."""
    matches = []
    for x in sorted(set(_knots(arm) + _knots(base))):
        ours, theirs = throughput_at(arm, x), throughput_at(base, x)
        if ours is not None and theirs is not None and theirs > 0:
            matches.append(Match(x, ours, theirs))
    return matches


def best_match(arm: Curve, base: Curve) -> Match | None:
    """The matched point with the largest ratio (the arrow of Figure 8)."""
    return max(matched(arm, base), key=lambda match: match.ratio, default=None)


def bootstrap(
    statistic: Callable[[list[int]], float | None],  # of a resampled list of rounds
    rounds: list[int],
    *,
    seed: int = 0,
) -> tuple[float, float] | None:
    """95 % interval over resampled rounds; None for one round, or if it is often undefined."""
    if len(rounds) < 2:
        return None
    rng = np.random.default_rng(seed)
    draws = np.sort(rng.choice(rounds, size=(RESAMPLES, len(rounds))), axis=1)
    # Few rounds have few distinct resamples: each is computed once.
    distinct, counts = np.unique(draws, axis=0, return_counts=True)
    values = [statistic([int(r) for r in draw]) for draw in distinct]
    known = np.array([value is not None for value in values])
    if counts[known].sum() < 0.9 * RESAMPLES:
        return None
    defined = np.array([value for value in values if value is not None])
    low, high = np.percentile(np.repeat(defined, counts[known]), [2.5, 97.5])
    return float(low), float(high)


def compare_pair(table: Table, arm: str, base: str) -> dict[str, Any]:
    """Ratios of ``arm`` to ``base``: per load, and the largest at matched interactivity."""
    ours, theirs = table[arm], table[base]
    loads = {}
    for load in sorted(ours.keys() & theirs.keys()):
        rounds = sorted(ours[load].keys() & theirs[load].keys())
        if rounds:
            loads[load] = _load_ratio(ours[load], theirs[load], rounds)
    shared = sorted(_rounds(ours) & _rounds(theirs))
    best = best_match(curve(ours, shared), curve(theirs, shared))
    if best is None:
        return {"arm": arm, "base": base, "loads": loads, "best": None}

    def best_ratio(rounds: list[int]) -> float | None:
        # The largest ratio, wherever it lies: at a fixed interactivity a resample would
        # often end just short of it, at the edge of a curve or of its upper half.
        found = best_match(curve(ours, rounds), curve(theirs, rounds))
        return None if found is None else found.ratio

    return {
        "arm": arm,
        "base": base,
        "loads": loads,
        "best": {
            "interactivity_tokens_per_s": best.interactivity,
            "throughput_tokens_per_s": best.throughput,
            "base_throughput_tokens_per_s": best.base_throughput,
            "ratio": best.ratio,
            "interval": bootstrap(best_ratio, shared),
        },
    }


def best_over_strongest(table: Table) -> dict[str, Any] | None:
    """Largest ratio of ours to the best baseline at one interactivity; None for "n/a"."""
    bases = [base for base in BASELINES if base in table]
    if OURS not in table or not bases:
        return None
    shared = sorted(set.intersection(*(_rounds(table[arm]) for arm in (OURS, *bases))))
    curves = {arm: curve(table[arm], shared) for arm in (OURS, *bases)}
    knots = {x for points in curves.values() for x in _knots(points)}
    best: dict[str, Any] | None = None
    for x in sorted(knots):
        ours = throughput_at(curves[OURS], x)
        # Strongest of all that serve x; it must have a value there itself, or a weaker
        # baseline would stand in for one that is below half of its peak, or faster than x
        # at every load measured.
        theirs = [(_offered(curves[base], x), base) for base in bases]
        strongest, base = max(theirs)
        if ours is None or throughput_at(curves[base], x) is None:
            continue
        if best is None or ours / strongest > best["ratio"]:
            best = {
                "base": base,
                "interactivity_tokens_per_s": x,
                "throughput_tokens_per_s": ours,
                "base_throughput_tokens_per_s": strongest,
                "ratio": ours / strongest,
            }
    return best


def _offered(points: Curve, interactivity: float) -> float:
    """Throughput that an arm surely has at users this slow; 0 where it cannot be so fast."""
    found = throughput_at(points, interactivity, 0.0)
    if found is None and points and interactivity < min(p.interactivity for p in points):
        found = max(p.throughput for p in points)
    return found or 0.0


def _load_ratio(
    ours: dict[int, tuple[float, float]], theirs: dict[int, tuple[float, float]], rounds: list[int]
) -> dict[str, Any]:
    """Throughput and interactivity ratios at one load, over the rounds both have."""

    def ratio(column: int) -> Callable[[list[int]], float]:
        return lambda chosen: (
            sum(ours[r][column] for r in chosen) / sum(theirs[r][column] for r in chosen)
        )

    return {
        "rounds": len(rounds),
        "throughput_ratio": ratio(0)(rounds),
        "throughput_interval": bootstrap(ratio(0), rounds),
        "interactivity_ratio": ratio(1)(rounds),
        "interactivity_interval": bootstrap(ratio(1), rounds),
    }


def _rounds(loads: dict[int, dict[int, tuple[float, float]]]) -> set[int]:
    return {round_index for by_round in loads.values() for round_index in by_round}


def same_outputs(records: Iterable[LoadRecord], base: str = "ar") -> dict[str, dict[str, int]]:
    """Requests per arm whose output tokens equal the base arm's at the same point.

    Greedy decoding is lossless, so they differ only where the target's choice between
    nearly tied tokens depends on the shape of the batch.
    """
    rows = list(records)
    reference = {
        (r.load, r.round, r.batch): dict(zip(r.prompt_ids, r.output_sha256, strict=True))
        for r in rows
        if r.arm == base
    }
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        wanted = reference.get((row.load, row.round, row.batch), {})
        pairs = zip(row.prompt_ids, row.output_sha256, strict=True)
        same = [output == wanted[prompt] for prompt, output in pairs if prompt in wanted]
        if row.arm != base and same:
            cell = counts.setdefault(row.arm, {"requests": 0, "same": 0})
            cell["requests"] += len(same)
            cell["same"] += sum(same)
    return counts


def summarize_folder(folder: Path) -> Path:
    """Write ``summary.json`` from ``records.jsonl`` in ``folder``.

    Raises:
        ValueError: the records cannot be read.
    """
    path = Path(folder) / RECORDS
    records = read_records(path, LoadRecord)
    table = tabulate(records)
    pairs = [
        compare_pair(table, arm, base)
        for arm in table
        for base in BASES
        if base in table and base != arm
    ]
    summary = {
        "schema": 1,
        # A summary of other records is refused by its readers.
        "records_sha256": file_sha256(path) if path.exists() else None,
        "pairs": pairs,
        "best_over_strongest": best_over_strongest(table),
        "same_outputs_as_ar": same_outputs(records),
    }
    out = Path(folder) / SUMMARY
    write_json(out, summary)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="forespark.bench.compare")
    parser.add_argument("folder", type=Path, help="folder of records.jsonl")
    folder = parser.parse_args().folder
    try:
        if not (folder / RECORDS).is_file():
            raise ValueError(f"{folder}: no {RECORDS} there; run eval.py, or name its --out folder")
        print(summarize_folder(folder))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
