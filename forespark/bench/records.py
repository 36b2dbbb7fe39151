"""One measured point of a served benchmark, and reading such rows back.

Units are in the field names; None means "not measured" (an arm without a drafter has no
draft counters, a server without a step trace no step times). A ratio is never stored:
numerators and denominators are, and they are divided where they are shown.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from forespark.record import append_jsonl, read_jsonl

SCHEMA = 1
RECORDS = "records.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all points have: where they come from, and the server's counters over them."""

    schema: int = SCHEMA
    bench: str
    run_id: str  # names the run.json with configuration, commit, versions and device
    target: str
    arm: str
    round: int  # interleaved repetition, from 0
    prompt_ids: list[str]
    ends: list[str]  # finish reasons: "length" or "stop"; "error", "cancelled" where kept
    drafted_tokens: int | None = None  # what the drafter produced, prefill steps included
    verified_tokens: int | None = None  # draft tokens that the target checked
    accepted_tokens: int | None = None  # of these, kept

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the measured point; a key is never measured twice."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord(Record):
    """One point at a fixed number of requests in flight.

    The lists have one entry per request, in the order of ``prompt_ids``.

    decode: one batch of ``load`` requests, released together after their first tokens. The
    timed span of a request begins at the release, which the client sees as the last first
    token of the batch, and ends at its last timed token (Appendix C).

    e2e, mathcode: a window of a closed loop of ``load`` clients. The requests are those that
    ended in it; the timed span is from the first to the last token of a request.
    """

    bench: str = "decode"
    load: int  # C: requests in the batch, or clients
    batch: int  # batch within the point, from 0
    timed_tokens: list[int]  # tokens after the first
    span_s: list[float]  # seconds of the timed tokens; 0 when timed_tokens is 0
    output_sha256: list[str]  # of all output token ids, first token included
    throughput_tokens_per_s: float  # decode: sum of per-request rates; window: tokens / wall_s
    interactivity_tokens_per_s: float  # median of per-request rates
    wall_s: float  # decode: release to the last token of the batch; length of the window
    ttft_s_p50: float  # from the moment the batch, or the request, was due
    decode_steps: int | None = None  # engine steps of pure decoding in the step trace
    request_steps: int | None = None  # their requests, summed; None for windows
    verify_ms: float | None = None  # mean per decode step
    draft_ms: float | None = None
    other_ms: float | None = None
    prompt_tokens: list[int] | None = None  # windows only, as all below
    ttft_s: list[float] | None = None
    warmup_s: float | None = None  # before the window
    window_tokens: int | None = None  # output tokens of all requests that arrived in it
    lag_s_p99: float | None = None  # of the client: how late its own timers fired

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.bench, self.arm, self.load, self.round, self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloRecord(Record):
    """One point of the open loop: all measured arrivals at one rate.

    The lists have one entry per measured arrival, in the order of arrival; a request that
    failed or did not finish is among them.
    """

    bench: str = "slo"
    rate: float  # requests per second
    arrivals: str  # "poisson", or the recorded trace they follow
    warmup_requests: int  # arrivals before the measured ones
    due_s: list[float]  # since the first arrival of the warm-up
    prompt_tokens: list[int]
    output_tokens: list[int]
    ttft_s: list[float | None]  # from due to the first token; None without one
    tpot_s: list[float | None]  # None where fewer than two tokens came
    wall_s: float  # first measured arrival to the last token or the end of patience
    lag_s_p99: float  # of the client: how late it sent, or its own timers fired

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.bench, self.arm, self.rate, self.round)


R = TypeVar("R", bound=Record)


def _fields(kind: type[Record]) -> tuple[dict[str, str], set[str]]:
    """Annotated types of all fields, and the names of those that a row must have."""
    types = {f.name: str(f.type) for f in fields(kind)}
    needed = {name for name, annotation in types.items() if not annotation.endswith("| None")}
    return types, needed - {"schema", "bench"}


def append_record(path: Path, record: Record) -> None:
    """Append one row. NaN is refused here, where it was measured."""
    append_jsonl(path, asdict(record))


def read_records(path: Path, kind: type[R]) -> list[R]:
    """Rows of a ``records.jsonl``; an absent file has none.

    Raises:
        ValueError: another schema, an unknown or a missing field, a value of another type,
            a key that occurs twice; names file, line and field.
    """
    if not Path(path).exists():
        return []
    records: list[R] = []
    seen: dict[tuple[Any, ...], int] = {}
    form = _fields(kind)
    for number, row in enumerate(read_jsonl(path), start=1):
        record = kind(**_checked(row, *form, f"{path}, line {number}"))
        if record.key in seen:
            raise ValueError(
                f"{path}, line {number}: point {record.key} is already on line "
                f"{seen[record.key]}; two runs wrote this file, delete one of the lines"
            )
        seen[record.key] = number
        records.append(record)
    return records


def _checked(row: Any, types: dict[str, str], needed: set[str], where: str) -> dict[str, Any]:
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        found = row.get("schema") if isinstance(row, dict) else row
        raise ValueError(
            f"{where}: got schema {found!r}, this version reads {SCHEMA}; "
            "measure again or use the commit named in run.json"
        )
    unknown, missing = sorted(set(row) - set(types)), sorted(needed - set(row))
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    for name, value in row.items():
        if not _is(value, types[name]):
            raise ValueError(f"{where}: {name}: got {value!r}, want {types[name]}")
    return row


def _is(value: Any, kind: str) -> bool:
    """Whether a JSON value is of an annotated type; any finite number is a float."""
    if kind.endswith(" | None"):
        return value is None or _is(value, kind.removesuffix(" | None"))
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is(item, kind[5:-1]) for item in value)
    if kind == "str":
        return isinstance(value, str)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and (kind == "float" or value == int(value))
