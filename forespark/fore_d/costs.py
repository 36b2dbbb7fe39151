"""Measured prices of a step: drafting, verification and the rest, in milliseconds.

On CUDA a step replays a graph captured for a few token counts, so a price is constant
inside a bucket (``draft_stepwise``, ``verify_buckets``); on a CPU every token is paid
for and prices are linear between measured points. Past the last point a price grows
with the last segment's slope or the table's mean slope, whichever is steeper, so that
noise in the last point never makes a bigger step look free.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit

LATENCY_KEY = (
    "target",
    "drafter_sha256",
    "device",
    "tensor_parallel_size",
    "K",
    "max_num_seqs",
    "dtype",
    "vllm",
)


def check_key(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    what: str = "latency tables",
    command: str = "python curves.py",
) -> None:
    """Refuse a file that was made for something else.

    Args:
        found: key stored in the file.
        wanted: key of what runs now; only its fields are compared.
        what: the file, for the message.
        command: what makes the file, without ``--target``.

    Raises:
        ValueError: names every differing field, both values and the command to run.
    """
    wrong = [
        f"{name} is {found.get(name)!r} there but {value!r} here"
        for name, value in wanted.items()
        if name not in found or found[name] != value
    ]
    if wrong:
        target = wanted.get("target", found.get("target"))
        raise ValueError(
            f"{what} were made for something else: {'; '.join(wrong)}. "
            f"Run `{command} --target {target}`"
        )


@njit(cache=True)
def _slope_past_end(xs: np.ndarray, ys: np.ndarray) -> float:
    last = len(xs) - 1
    mean = (ys[last] - ys[0]) / (xs[last] - xs[0])
    return max(mean, (ys[last] - ys[last - 1]) / (xs[last] - xs[last - 1]))


@njit(cache=True)
def _interpolate(xs: np.ndarray, ys: np.ndarray, x: float, hint: int) -> tuple[float, int]:
    """Piecewise-linear value at x, flat before the first point; ``hint`` is the segment
    to start from when x never falls between calls."""
    last = len(xs) - 1
    if x <= xs[0]:
        return ys[0], 0
    if x >= xs[last]:
        return ys[last] + (x - xs[last]) * _slope_past_end(xs, ys), last - 1
    while xs[hint + 1] < x:
        hint += 1
    share = (x - xs[hint]) / (xs[hint + 1] - xs[hint])
    return ys[hint] + share * (ys[hint + 1] - ys[hint]), hint


@njit(cache=True)
def _pad(buckets: np.ndarray, tokens: int) -> int:
    """Tokens the device really processes: the bucket that holds them, or themselves."""
    at = np.searchsorted(buckets, tokens)
    return buckets[at] if at < len(buckets) else tokens


@njit(cache=True)
def _per_token(
    xs: np.ndarray, ys: np.ndarray, buckets: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Padded size and price of 0..tokens tokens: a table that outgrows its profile is
    rebuilt inside a step, so no Python loop."""
    padded, price = np.empty(tokens + 1, np.int64), np.empty(tokens + 1)
    segment = 0
    for t in range(tokens + 1):
        padded[t] = _pad(buckets, t)
        price[t], segment = _interpolate(xs, ys, float(padded[t]), segment)
    return padded, price


def _axis(values: Any, name: str, least: int, points: int = 2) -> np.ndarray:
    axis = np.asarray(values, dtype=np.int64).reshape(-1)
    if len(axis) < points or np.any(np.diff(axis) <= 0) or np.any(axis < least):
        raise ValueError(
            f"{name}: got {axis.tolist()}, want at least {points} increasing values >= {least}; "
            "measure more points with `python curves.py`"
        )
    return axis


def _prices(values: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Check a table of milliseconds and repair rises that noise turned into falls."""
    table = np.asarray(values, dtype=np.float64)
    if table.shape != shape:
        raise ValueError(f"{name}: got {table.shape} prices, want {shape}; the file is damaged")
    if not np.all(np.isfinite(table)) or np.any(table < 0):
        raise ValueError(
            f"{name}: got NaN, infinite or negative milliseconds; measure again with "
            "`python curves.py`"
        )
    repaired = table
    for dim in range(table.ndim):
        repaired = np.maximum.accumulate(repaired, axis=dim)
    if np.any(repaired > table):
        drop = float((repaired - table).max())
        warnings.warn(
            f"{name}: {int((repaired > table).sum())} of {table.size} prices fall below a smaller "
            f"step's (by up to {drop:.3g} ms); raised to its price",
            stacklevel=4,
        )
    return np.ascontiguousarray(repaired)


@dataclass
class CostTables:
    """Prices of one step on one device.

    Every price table is non-decreasing after construction. The reading of
    ``verify_points_ms[b, v]`` is: b requests, each verifying v drafts, b(1 + v) tokens.
    Between batch sizes the price is linear in the batch at equal tokens per request.

    Raises:
        ValueError: an empty or one-point axis, NaN, negative or misshapen prices. A
            non-monotone table is raised to its running maximum with a warning.
    """

    draft_tokens: np.ndarray  # [P] packed drafter tokens, sum of (d_i + 1)
    draft_points_ms: np.ndarray  # [P]
    verify_batches: np.ndarray  # [b] requests
    verify_per_request: np.ndarray  # [v] drafts verified per request
    verify_points_ms: np.ndarray  # [b, v]
    other_batches: np.ndarray  # [o] requests
    other_points_ms: np.ndarray  # [o] sampling and host time
    draft_stepwise: bool = False  # draft_tokens are graph sizes: pay for the next one up
    verify_buckets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    key: dict[str, Any] = field(default_factory=dict)  # what the tables were measured on

    def __post_init__(self) -> None:
        self.draft_tokens = _axis(self.draft_tokens, "draft tokens", 1)
        self.verify_batches = _axis(self.verify_batches, "verify batch", 1)
        self.verify_per_request = _axis(self.verify_per_request, "verify per_request", 0)
        self.other_batches = _axis(self.other_batches, "other batch", 1)
        self.verify_buckets = _axis(self.verify_buckets, "verify buckets", 1, points=0)
        grid = (len(self.verify_batches), len(self.verify_per_request))
        self.draft_points_ms = _prices(self.draft_points_ms, "draft ms", (len(self.draft_tokens),))
        self.verify_points_ms = _prices(self.verify_points_ms, "verify ms", grid)
        self.other_points_ms = _prices(self.other_points_ms, "other ms", (len(self.other_batches),))
        if self.verify_points_ms[0, 0] <= 0:
            raise ValueError("verify ms: got 0 ms for the smallest step; measure again")
        self._knots: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._other: dict[int, float] = {}
        self._grow(int(self.draft_tokens[-1]))

    def _grow(self, tokens: int) -> None:
        """(Re)build the per-token draft price and the bucket each token count pads to."""
        buckets = self.draft_tokens if self.draft_stepwise else np.zeros(0, np.int64)
        xs, ys = self.draft_tokens.astype(np.float64), self.draft_points_ms
        self.draft_padded, self.draft_table = _per_token(xs, ys, buckets, tokens)
        self.draft_padded[0] = 0
        self.draft_table[0] = 0.0

    def draft_arrays(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(ms, padded tokens), each indexed by 0..tokens or further; grown on demand."""
        if tokens >= len(self.draft_table):
            self._grow(max(tokens, 2 * len(self.draft_table)))
        return self.draft_table, self.draft_padded

    def draft_ms(self, tokens: int) -> float:
        """Price of a drafter forward over ``tokens`` packed tokens; 0 tokens are skipped, 0 ms."""
        return float(self.draft_arrays(tokens)[0][tokens])

    def verify_knots(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Total tokens and milliseconds of the measured points, blended for one batch size."""
        batch = max(int(batch), 1)
        if batch not in self._knots:
            xs = self.verify_batches.astype(np.float64)
            ms = [
                _interpolate(xs, np.ascontiguousarray(column), float(batch), 0)[0]
                for column in self.verify_points_ms.T
            ]
            tokens = batch * (1.0 + self.verify_per_request)
            self._knots[batch] = (tokens, np.maximum.accumulate(np.array(ms)))
        return self._knots[batch]

    def verify_ms(self, total_tokens: int, batch: int) -> float:
        """Price of a target forward over ``total_tokens`` = N + B with ``batch`` requests."""
        xs, ys = self.verify_knots(batch)
        padded = _pad(self.verify_buckets, int(total_tokens))
        return float(_interpolate(xs, ys, float(padded), 0)[0])

    def other_ms(self, batch: int) -> float:
        """Price of sampling and host work at one batch size."""
        batch = max(int(batch), 1)
        if batch not in self._other:
            xs = self.other_batches.astype(np.float64)
            self._other[batch] = float(_interpolate(xs, self.other_points_ms, float(batch), 0)[0])
        return self._other[batch]

    @classmethod
    def from_record(
        cls,
        record: Mapping[str, Any],
        wanted: Mapping[str, Any] | None = None,
        source: str = "latency.json",
    ) -> CostTables:
        """Build tables from the content of a ``latency.json``.

        ``wanted`` is the key of the engine that starts; None skips the check (replay).

        Raises:
            ValueError: another key or schema, a missing part, or a bad table.
        """
        if record.get("schema") != 1:
            raise ValueError(f"{source}: schema is {record.get('schema')!r}, this version reads 1")
        try:
            draft, verify, other = record["draft"], record["verify"], record["other"]
            key = dict(record["key"])
            parts = (draft["tokens"], draft["ms"], verify["batch"], verify["per_request"])
            rest = (verify["ms"], other["batch"], other["ms"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{source}: {error} is missing or not a table; measure again with "
                "`python curves.py`"
            ) from None
        if wanted is not None:
            check_key(key, wanted, what=f"{source}: latency tables")
        try:
            return cls(
                *parts,
                *rest,
                draft_stepwise=bool(draft.get("stepwise", False)),
                verify_buckets=verify.get("buckets", []),
                key=key,
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from None
