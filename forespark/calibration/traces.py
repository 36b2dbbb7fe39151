"""Step traces as arrays for the calibration fits.

A trace is a JSON-lines file. Its first line, and the first line of every later run
that appends to it, is a header; every other line is one engine step:

    {"header": {"schema": 1, "target": str, "drafter": "forespark" | "dspark",
                "drafter_sha256": str, "K": int, "form": "triangle" | "row" | null,
                "arm": str, "force_length": int | null}}
    {"step": i, ..., "requests": [{"id": str, "d": int, "v": int, "a": int,
                                   "z": [d numbers] | null, "l": [d numbers] | null}]}

``form`` is the pre-draft estimator's (null: none). ``z`` is the row of pre-draft logits
that a length-d draft reads, ``l`` the post-draft logits, ``d`` the drafted, ``v`` the
verified and ``a`` the accepted tokens. JSON has no NaN: a NaN logit is written as null.
A header may carry further fields; they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forespark.fore_d.calibrated import CALIBRATION_KEY, COMMAND
from forespark.fore_d.costs import check_key
from forespark.record import read_jsonl


@dataclass(frozen=True)
class Drafts:
    """Fully verified drafts of one length d."""

    accepted: np.ndarray  # [S] int64, A in 0..d
    z: np.ndarray | None  # [S, d] pre-draft logits, None: the drafter has none
    l: np.ndarray | None  # [S, d] post-draft logits, None: not traced  # noqa: E741


@dataclass
class Traces:
    """Drafts by length, and what was left out."""

    drafts: dict[int, Drafts]
    form: str | None  # of the pre-draft logits
    dropped: dict[str, int] = field(default_factory=dict)  # drafts by reason


def read_traces(
    paths: Iterable[Path],
    wanted: Mapping[str, Any],  # key of what is calibrated, CALIBRATION_KEY fields
) -> Traces:
    """Read traces of one drafter and target.

    Drafts that were not verified to their end are left out (their outcome is censored),
    so are drafts with a NaN logit; both are counted in ``dropped``.

    Raises:
        ValueError: no file, no header, a header for another target or drafter, a step
            whose numbers contradict each other; names file, line and what to run.
    """
    paths = [Path(p) for p in paths]
    if not paths:
        raise ValueError(f"no trace files: run `{COMMAND} --target {wanted.get('target')}`")
    rows: dict[int, list[dict[str, Any]]] = {}
    dropped = {"not_fully_verified": 0, "nan": 0}
    forms: set[str | None] = set()
    for path in paths:
        for request in graded(path, wanted, forms):
            if request["v"] < request["d"]:
                dropped["not_fully_verified"] += 1
            elif has_nan(request):
                dropped["nan"] += 1
            else:
                rows.setdefault(request["d"], []).append(request)
    if len(forms) > 1:
        raise ValueError(f"traces mix pre-draft forms {sorted(map(str, forms))}; delete one kind")
    drafts = {d: _stack(rows[d], d) for d in sorted(rows)}
    return Traces(drafts, next(iter(forms)), dropped)


def graded(
    path: Path, wanted: Mapping[str, Any], forms: set[str | None]
) -> Iterable[dict[str, Any]]:
    """Drafts of one trace file in order; adds the pre-draft forms of its headers to ``forms``."""
    if not path.exists():
        raise ValueError(f"{path}: no such trace; run `{COMMAND} --target {wanted.get('target')}`")
    lines = read_jsonl(path)
    if not lines or "header" not in lines[0]:
        raise ValueError(
            f"{path}: the first line is no header, so what was traced is unknown; delete the file "
            f"and run `{COMMAND} --target {wanted.get('target')}`"
        )
    for number, line in enumerate(lines, start=1):
        if "header" in line:
            check_key(
                line["header"],
                {"schema": 1, **{k: wanted[k] for k in CALIBRATION_KEY if k in wanted}},
                what=f"{path}, line {number}: traces",
                command=COMMAND,
            )
            forms.add(line["header"].get("form"))
            continue
        for request in line.get("requests") or []:
            if request["d"] > 0:
                _check(request, f"{path}, line {number}", int(wanted["K"]))
                yield request


def _check(request: Mapping[str, Any], where: str, K: int) -> None:
    d, v, a = request["d"], request["v"], request["a"]
    widths = [len(request[name]) for name in ("z", "l") if request.get(name) is not None]
    if not 0 <= a <= v <= d <= K or any(width != d for width in widths):
        raise ValueError(
            f"{where}: request {request.get('id')!r} has d={d}, v={v}, a={a} and {widths} logits; "
            f"want a <= v <= d <= K={K} and d logits each. The trace is damaged: delete it"
        )


def has_nan(request: Mapping[str, Any]) -> bool:
    """A logit of the draft was not finite."""
    return any(None in request[name] for name in ("z", "l") if request.get(name) is not None)


def _stack(rows: list[dict[str, Any]], d: int) -> Drafts:
    def logits(name: str) -> np.ndarray | None:
        present = [row.get(name) is not None for row in rows]
        if not any(present):
            return None
        if not all(present):
            raise ValueError(
                f"traces: {present.count(False)} of {len(rows)} drafts of length {d} lack "
                f"{name!r}; they mix arms: delete them and run `{COMMAND}` again"
            )
        return np.array([row[name] for row in rows], dtype=np.float64)

    accepted = np.array([row["a"] for row in rows], dtype=np.int64)
    return Drafts(accepted, logits("z"), logits("l"))
