"""Acceptance table and figure from made-up records: complete, partial, none, damaged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forespark.record import append_jsonl

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plot"))

import acceptance
import claims


def row(drafter, name, accepted):
    return {"schema": 1, "bench": "acceptance", "drafter": drafter, "set": name, "K": 7,
            "requests": 4, "tokens": 99, "blocks": 40, "accepted": accepted}  # fmt: skip


def write(folder, *rows):
    for line in rows:
        append_jsonl(folder / "records.jsonl", line)
    return folder


def test_table_and_mean_over_common_sets(tmp_path):
    for drafter, name, count in (
        ("forespark", "math", 60), ("dspark", "math", 40), ("forespark", "code", 20),
        ("dspark", "code", 30), ("forespark", "qa", 80),
    ):  # fmt: skip
        write(tmp_path, row(drafter, name, count))
    frame = acceptance.read(tmp_path)
    text = acceptance.render(frame)
    assert "| set | requests | DSpark | ForeSpark |" in text
    assert "| math | 4 | 2.00 | 2.50 |" in text and "| qa | 4 | n/a | 3.00 |" in text
    assert "| mean | | 1.88 | 2.00 |" in text
    assert claims.accepted(tmp_path) == "2.00 (1.88)"
    bars = acceptance.draw(frame, "smollm2").axes[0].patches
    assert sorted(b.get_height() for b in bars if b.get_height() > 0) == [1.5, 1.75, 2, 2.5, 3]


def test_one_drafter_or_nothing(tmp_path):
    assert acceptance.render(acceptance.read(tmp_path)) == "No acceptance records yet.\n"
    assert claims.accepted(tmp_path) is None
    write(tmp_path, row("forespark", "math", 60))
    assert claims.accepted(tmp_path) is None
    acceptance.draw(acceptance.read(tmp_path), "smollm2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"bench": "decode"}, "bench: got 'decode'"), ({"blocks": 0}, "blocks: got 0, want some"),
     ({"accepted": None}, "accepted: got None, want a number"), ({"set": 3}, "set: got 3")],
)  # fmt: skip
def test_damaged_records_are_named(tmp_path, changes, message):
    write(tmp_path, row("forespark", "math", 60) | changes)
    with pytest.raises(ValueError, match=f"records.jsonl, line 1: {message}"):
        acceptance.read(tmp_path)
