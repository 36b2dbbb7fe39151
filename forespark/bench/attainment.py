"""SLO attainment of open-loop records: curves, capacities and their ratios (Appendix C).

A request attains when its TTFT and its TPOT are both within their limits. One that failed or
did not finish is a miss. With fewer than two tokens there is no TPOT, and what is not known
is not within a limit: such a request is a miss, too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forespark.bench.records import RECORDS, SloRecord, read_records
from forespark.config import SloConfig
from forespark.record import file_sha256, write_json

SUMMARY = "summary.json"
FINISHED = ("stop", "length")
RESAMPLES = 2000
BASES = ("ar", "dspark", "dflash2", "forespark_nojs")
OURS = "forespark"

Requests = dict[str, dict[float, np.ndarray]]  # arm -> rate -> one bool per request


def attained(record: SloRecord, ttft_s: float, tpot_s: float) -> np.ndarray:
    """Whether each request met both limits; bool [requests]."""
    return np.array(
        [
            end in FINISHED
            and ttft is not None
            and tpot is not None
            and ttft <= ttft_s
            and tpot <= tpot_s
            for end, ttft, tpot in zip(record.ends, record.ttft_s, record.tpot_s, strict=True)
        ],
        dtype=bool,
    )


def by_rate(records: Iterable[SloRecord], ttft_s: float, tpot_s: float) -> Requests:
    """All rounds of an arm and rate together."""
    found: dict[str, dict[float, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        found[record.arm][record.rate].append(attained(record, ttft_s, tpot_s))
    return {
        arm: {rate: np.concatenate(met) for rate, met in sorted(rates.items())}
        for arm, rates in found.items()
    }


def capacity(rates: Sequence[float], shares: Sequence[float], level: float) -> float | None:
    """The rate at which attainment falls to ``level``, interpolated linearly.

    Args:
        rates: requests per second, ascending.
        shares: attainment at each.

    Returns:
        None when attainment is below the level at the lowest rate already, and infinity when
        it is not below it at any rate: both mean "not reached", on different sides.
    """
    points = list(zip(rates, shares, strict=True))
    if not points or points[0][1] < level:
        return None
    for (low, above), (high, below) in itertools.pairwise(points):
        if below < level:
            return low + (high - low) * (above - level) / (above - below)
    return float("inf")


def resampled(
    rates: dict[float, np.ndarray], level: float, seed: int = 0
) -> tuple[float | None, np.ndarray]:
    """Capacity, and what it is when the requests of every rate are drawn anew.

    Args:
        rates: requests per second -> bool [requests].

    Returns:
        The capacity, and float [RESAMPLES]; NaN where it is below the lowest rate.
    """
    ordered = sorted(rates)
    value = capacity(ordered, [float(rates[rate].mean()) for rate in ordered], level)
    rng = np.random.default_rng(seed)
    shares = np.stack(
        [rng.binomial(rates[r].size, rates[r].mean(), RESAMPLES) / rates[r].size for r in ordered]
    )
    drawn = [capacity(ordered, list(column), level) for column in shares.T]
    return value, np.array([np.nan if c is None else c for c in drawn])


def interval(values: np.ndarray) -> list[float] | None:
    """95 % interval; None where more than a tenth has no finite value."""
    finite = values[np.isfinite(values)]
    if finite.size < 0.9 * values.size:
        return None
    return [float(x) for x in np.percentile(finite, [2.5, 97.5])]


def number(value: float | None) -> float | str | None:
    """A capacity for JSON, which has no infinity: None below the rates, "above" above them."""
    return "above" if value == float("inf") else value


def compare(found: Requests, level: float) -> dict[str, Any]:
    """Capacities of all arms, and ratios of ours to the others'."""
    values = {arm: resampled(rates, level, seed) for seed, (arm, rates) in enumerate(found.items())}
    capacities = {
        arm: {"rate": number(value), "interval": interval(drawn)}
        for arm, (value, drawn) in values.items()
    }
    ratios = {}
    for base in BASES:
        if OURS in values and base in values:
            (ours, our_draws), (theirs, their_draws) = values[OURS], values[base]
            known = ours is not None and theirs is not None and np.isfinite([ours, theirs]).all()
            with np.errstate(invalid="ignore"):
                spread = interval(our_draws / their_draws)
            ratios[base] = {
                "ratio": ours / theirs if known and ours and theirs else None,
                "interval": spread if known else None,
            }
    return {"capacities": capacities, "ratios": ratios}


def scale_rate(found: Requests, level: float, base: str = "dspark") -> float | None:
    """The lowest measured rate above ``base``'s capacity: where limits are scaled (Fig. 9b)."""
    if base not in found:
        return None
    rates = sorted(found[base])
    limit = capacity(rates, [float(found[base][rate].mean()) for rate in rates], level)
    return next((rate for rate in rates if rate > (limit or 0.0)), None)


def summarize_folder(folder: Path, slo: SloConfig) -> Path:
    """Write ``summary.json`` from ``records.jsonl`` in ``folder``.

    Raises:
        ValueError: the records cannot be read.
    """
    path = Path(folder) / RECORDS
    records = read_records(path, SloRecord)
    found = by_rate(records, slo.ttft_s, slo.tpot_s)
    rate = scale_rate(found, slo.level)
    scales: dict[str, list[float]] = {}
    if rate is not None:
        for scale in slo.scales:
            at = by_rate(records, scale * slo.ttft_s, scale * slo.tpot_s)
            for arm in at:
                if rate in at[arm]:
                    scales.setdefault(arm, []).append(float(at[arm][rate].mean()))
    out = Path(folder) / SUMMARY
    write_json(
        out,
        {
            "schema": 1,
            # A summary of other records is refused by its readers.
            "records_sha256": file_sha256(path) if path.exists() else None,
            "ttft_s": slo.ttft_s,
            "tpot_s": slo.tpot_s,
            "level": slo.level,
            "attainment": {
                arm: [[r, float(met.mean()), int(met.size)] for r, met in rates.items()]
                for arm, rates in found.items()
            },
            **compare(found, slo.level),
            "scale_rate": rate,
            "scales": slo.scales,
            "scaled": scales,
        },
    )
    return out
