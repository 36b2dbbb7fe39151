"""One measured batch of the decode benchmark, and reading such rows back.

Units are in the field names; None means "not measured" (an arm without a drafter has no
draft counters, a server without a step trace no step times). A ratio is never stored:
numerators and denominators are, and they are divided where they are shown.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forespark.record import append_jsonl, read_jsonl

SCHEMA = 1
RECORDS = "records.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRecord:
    """One batch of ``load`` requests, released together after their first tokens.

    The lists have one entry per request, in the order of ``prompt_ids``. The timed span
    of a request begins at the release, which the client sees as the last first token of
    the batch, and ends at its last timed token (Appendix C).
    """

    schema: int = SCHEMA
    bench: str = "decode"
    run_id: str  # names the run.json with configuration, commit, versions and device
    target: str
    arm: str
    load: int  # C: requests in the batch
    round: int  # interleaved repetition, from 0
    batch: int  # batch within the point, from 0
    prompt_ids: list[str]
    timed_tokens: list[int]  # tokens after the first
    span_s: list[float]  # release to last timed token; 0 when timed_tokens is 0
    ends: list[str]  # finish reasons: "length" or "stop"
    output_sha256: list[str]  # of all output token ids, first token included
    throughput_tokens_per_s: float  # sum of per-request rates
    interactivity_tokens_per_s: float  # median of per-request rates
    wall_s: float  # release to the last token of the batch
    ttft_s_p50: float  # from the moment the batch was due, prefill of the batch included
    drafted_tokens: int | None = None  # what the drafter produced, prefill steps included
    verified_tokens: int | None = None  # draft tokens that the target checked
    accepted_tokens: int | None = None  # of these, kept
    decode_steps: int | None = None  # engine steps of pure decoding in the step trace
    request_steps: int | None = None  # their requests, summed
    verify_ms: float | None = None  # mean per decode step
    draft_ms: float | None = None
    other_ms: float | None = None

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """Identity of the measured point; a key is never measured twice."""
        return (self.bench, self.arm, self.load, self.round, self.batch)


_TYPES = {f.name: str(f.type) for f in fields(DecodeRecord)}
_NAMES = set(_TYPES)
_REQUIRED = {
    "run_id", "target", "arm", "load", "round", "batch", "prompt_ids", "timed_tokens",
    "span_s", "ends", "output_sha256", "throughput_tokens_per_s",
    "interactivity_tokens_per_s", "wall_s", "ttft_s_p50",
}  # fmt: skip


def append_record(path: Path, record: DecodeRecord) -> None:
    """Append one row. NaN is refused here, where it was measured."""
    append_jsonl(path, asdict(record))


def read_records(path: Path) -> list[DecodeRecord]:
    """Rows of a ``records.jsonl``; an absent file has none.

    Raises:
        ValueError: another schema, an unknown or a missing field, a value of another type,
            a key that occurs twice; names file, line and field.
    """
    if not Path(path).exists():
        return []
    records: list[DecodeRecord] = []
    seen: dict[tuple[str, str, int, int, int], int] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        record = _parse(row, f"{path}, line {number}")
        if record.key in seen:
            raise ValueError(
                f"{path}, line {number}: point {record.key} is already on line "
                f"{seen[record.key]}; two runs wrote this file, delete one of the lines"
            )
        seen[record.key] = number
        records.append(record)
    return records


def _parse(row: Any, where: str) -> DecodeRecord:
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        found = row.get("schema") if isinstance(row, dict) else row
        raise ValueError(
            f"{where}: got schema {found!r}, this version reads {SCHEMA}; "
            "measure again or use the commit named in run.json"
        )
    unknown, missing = sorted(set(row) - _NAMES), sorted(_REQUIRED - set(row))
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    for name, value in row.items():
        if not _is(value, _TYPES[name]):
            raise ValueError(f"{where}: {name}: got {value!r}, want {_TYPES[name]}")
    return DecodeRecord(**row)


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
