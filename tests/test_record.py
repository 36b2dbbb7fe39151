"""Files are whole or absent, JSON lines survive a kill, NaN is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from forespark import record


def test_json_round_trip_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    record.write_json(path, {"x": [1, 2.5, "é"]})
    assert record.read_json(path) == {"x": [1, 2.5, "é"]}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record.write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        record.write_json(path, {"x": math.nan})
    assert record.read_json(path) == {"x": 1}


@pytest.mark.parametrize("content", [None, "", '{"x": 1', "\x00\x01"])
def test_missing_or_corrupt_json_names_the_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"a\.json"):
        record.read_json(path)


def test_a_torn_last_line_is_dropped_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record.append_jsonl(path, {"i": 0})
    with path.open("a") as out:
        out.write('{"i": 1, "te')  # killed here
    assert record.read_jsonl(path) == [{"i": 0}]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"i": 0}\nnope\n{"i": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        record.read_jsonl(path)


def test_appending_after_a_torn_line_loses_only_the_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record.append_jsonl(path, {"i": 0})
    with path.open("a") as out:
        out.write('{"i": 1, "te')
    record.append_jsonl(path, {"i": 2})
    assert record.read_jsonl(path) == [{"i": 0}, {"i": 2}]


def test_a_line_torn_inside_a_character_is_dropped_and_a_whole_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"i": 0}\n{"t": "\xc3')
    assert record.read_jsonl(path) == [{"i": 0}]
    path.write_bytes(b'{"i": 0}\n{"i": 1}')
    record.append_jsonl(path, {"i": 2})
    assert [row["i"] for row in record.read_jsonl(path)] == [0, 1, 2]


def test_provenance_is_json_and_names_commit_and_versions() -> None:
    made = json.loads(json.dumps(record.provenance(), allow_nan=False))
    assert set(made) == {"commit", "dirty", "argv", "versions", "device", "time"}
    assert made["versions"]["python"]
    assert made["device"]
