"""Traces, calibration.json and latency.json: round trips and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forespark.calibration.latency import (
    points_missing,
    read_latency,
    read_timings,
    summarise,
    write_latency,
)
from forespark.calibration.store import read_calibration, report, write_calibration
from forespark.calibration.traces import read_traces
from forespark.fore_d.calibrated import Calibration, PostCalibration, PreCalibration
from forespark.record import append_jsonl, read_json, write_json

KEY = {"target": "smollm2", "drafter": "forespark", "drafter_sha256": "ab12", "K": 2}
HEADER = {"header": {"schema": 1, **KEY, "form": "triangle", "arm": "forespark"}}


def draft(d, v, a, z=None, post=None):
    return {"id": "r", "pos": 5, "d": d, "v": v, "a": a, "z": z, "l": post}


def write_trace(path, *lines):
    for line in lines:
        append_jsonl(path, line)
    return path


def test_traces_become_arrays_by_length(tmp_path):
    path = write_trace(
        tmp_path / "t.jsonl",
        HEADER,
        {"step": 0, "requests": [draft(2, 2, 1, [0.5, 1.0], [2.0, 3.0]), draft(0, 0, 0)]},
        {"step": 1, "requests": [draft(1, 1, 1, [0.1], [0.2]), draft(2, 1, 1, [1, 1], [1, 1])]},
        {"step": 2, "requests": [draft(2, 2, 0, [None, 1.0], [2.0, 3.0])]},
        {"step": 3, "requests": None},
    )
    traces = read_traces([path], KEY)
    assert sorted(traces.drafts) == [1, 2]
    np.testing.assert_array_equal(traces.drafts[2].z, [[0.5, 1.0]])
    np.testing.assert_array_equal(traces.drafts[2].l, [[2.0, 3.0]])
    assert traces.drafts[2].accepted.tolist() == [1]
    assert traces.dropped == {"not_fully_verified": 1, "nan": 1}
    assert traces.form == "triangle"


def test_trace_without_pre_logits(tmp_path):
    header = {"header": {**HEADER["header"], "form": None}}
    path = write_trace(tmp_path / "t", header, {"requests": [draft(1, 1, 0, None, [0.3])]})
    assert read_traces([path], KEY).drafts[1].z is None


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ([], "no header"),
        ([{"step": 0}], "no header"),
        ([{"header": {**HEADER["header"], "drafter_sha256": "ff"}}], "drafter_sha256 is 'ff'"),
        ([{"header": {**HEADER["header"], "target": "qwen14"}}], "target is 'qwen14'"),
        ([HEADER, {"header": {**HEADER["header"], "K": 7}}], "line 2: .* K is 7"),
        ([HEADER, {"requests": [draft(2, 2, 3)]}], "damaged"),
        ([HEADER, {"requests": [draft(2, 2, 1, [0.1], None)]}], "damaged"),
        ([HEADER, {"requests": [draft(1, 1, 1, [0.1]), draft(1, 1, 1)]}], "mix arms"),
    ],
)
def test_bad_traces_are_refused(tmp_path, lines, word):
    path = tmp_path / "t.jsonl"
    path.touch()
    write_trace(path, *lines)
    with pytest.raises(ValueError, match=word):
        read_traces([path], KEY)


def test_missing_traces_name_the_command(tmp_path):
    for paths in ([], [tmp_path / "none.jsonl"]):
        with pytest.raises(ValueError, match=r"python calibrate\.py --target smollm2"):
            read_traces(paths, KEY)


def calibration(**changes):
    parts = {
        "key": KEY,
        "post": PostCalibration([1.0, 2.0], [0.1, None], [0.01, None], [50, 0]),
        "pre": PreCalibration(
            "triangle",
            [[1.0], [1.0, 0.8]],
            [[0.0], [0.1, 0.2]],
            [[9], [9, 4]],
            [[True], [False, False]],
            [0.1, 0.2],
            [0.01, 0.02],
        ),
    }
    return Calibration(**{**parts, **changes})


def test_calibration_round_trip(tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration())
    assert read_calibration(path, KEY) == calibration()
    scale, bias = calibration().pre.flat()
    np.testing.assert_allclose(scale, [1, 1, 0.8], rtol=1e-6)
    np.testing.assert_allclose(bias, [0, 0.1, 0.2], rtol=1e-6)
    assert read_json(path)["provenance"]["argv"]
    assert "1 of 3" in report(calibration())
    write_calibration(path, calibration(pre=None))
    assert read_calibration(path).pre is None
    assert len(report(calibration(pre=None)).splitlines()) == 3


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda c: c["post"].update(theta=[1.0, 0.0]), "want > 0"),
        (lambda c: c["post"].update(theta=[1.0]), "2 finite numbers"),
        (lambda c: c["pre"].update(scale=[[1.0], [1.0]]), "scale row 2"),
        (lambda c: c["pre"].update(bias=[[1.0]]), "want 2 rows"),
        (lambda c: c["pre"].update(form="square"), "square"),
        (lambda c: c["pre"]["bias"][1].__setitem__(0, "x"), "finite"),
        (lambda c: c["key"].update(K=0), "K is 0"),
        (lambda c: c.pop("post"), "missing"),
        (lambda c: c.update(schema=2), "schema 1"),
    ],
)
def test_damaged_calibrations_are_refused(tmp_path, edit, word):
    content = json.loads(json.dumps(calibration().record()))
    edit(content)
    path = tmp_path / "calibration.json"
    write_json(path, content)
    with pytest.raises(ValueError, match=word):
        read_calibration(path)


def test_calibration_of_another_drafter_is_refused(tmp_path):
    path = tmp_path / "calibration.json"
    with pytest.raises(ValueError, match=r"no calibration; run .*--target smollm2"):
        read_calibration(path, KEY)
    write_calibration(path, calibration())
    with pytest.raises(ValueError, match=r"drafter_sha256 .* `python calibrate\.py --target"):
        read_calibration(path, {**KEY, "drafter_sha256": "cd34"})
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match="truncated"):
        read_calibration(path)


ENGINE = {
    "target": "smollm2",
    "drafter_sha256": "ab12",
    "device": "cpu",
    "tensor_parallel_size": 1,
    "K": 2,
    "max_num_seqs": 4,
    "dtype": "float32",
    "vllm": "0.30.0",
}


def write_raw(path, repeats=3, verify_batches=(1, 2, 4)):
    append_jsonl(path, {"kind": "header", "key": ENGINE})
    for noise in ([0.0, 0.1, 50.0] * repeats)[:repeats]:  # one outlier in three
        for t in (2, 4, 8):
            append_jsonl(path, {"kind": "draft", "tokens": t, "ms": 1.0 + t + noise})
        for b in verify_batches:
            append_jsonl(path, {"kind": "other", "batch": b, "ms": 0.5 * b + noise})
            for v in (0, 1, 2):
                ms = 20.0 + b * (1 + v) + noise
                append_jsonl(path, {"kind": "verify", "batch": b, "per_request": v, "ms": ms})
    return path


def test_latency_round_trip_uses_medians(tmp_path):
    key, samples = read_timings(write_raw(tmp_path / "raw.jsonl"), ENGINE)
    record = summarise(key, samples, min_samples=3)
    assert record["draft"]["ms"] == pytest.approx([3.1, 5.1, 9.1])
    path = tmp_path / "latency.json"
    write_latency(path, record)
    costs = read_latency(path, ENGINE)
    assert costs.draft_ms(4) == pytest.approx(5.1)
    assert costs.verify_ms(12, 4) == pytest.approx(32.1)
    assert costs.other_ms(2) == pytest.approx(1.1)
    assert costs.key == ENGINE


@pytest.mark.parametrize("name", list(ENGINE))
def test_tables_of_another_engine_are_refused(tmp_path, name):
    path = tmp_path / "latency.json"
    write_latency(path, summarise(*read_timings(write_raw(tmp_path / "raw")), min_samples=3))
    with pytest.raises(ValueError, match=rf"{name} is .* `python curves\.py --target"):
        read_latency(path, {**ENGINE, name: "other"})


def test_short_points_are_left_out_loudly(tmp_path):
    path = write_raw(tmp_path / "raw")
    append_jsonl(path, {"kind": "draft", "tokens": 16, "ms": 1.0})
    append_jsonl(path, {"kind": "verify", "batch": 8, "per_request": 0, "ms": 1.0})
    key, samples = read_timings(path)
    with pytest.warns(UserWarning, match=r"\(16,\) has 1"):
        record = summarise(key, samples, min_samples=3)
    assert record["draft"]["tokens"] == [2, 4, 8]
    assert record["verify"]["batch"] == [1, 2, 4]
    with pytest.warns(UserWarning, match=r"left out batch 8, not measured at \[1, 2\]"):
        summarise(key, samples, min_samples=1)
    assert points_missing(samples, "draft", [(8,), (16,), (32,)], 3) == [(16,), (32,)]


def test_a_forced_length_that_changes_nothing_is_reported(tmp_path):
    path = write_raw(tmp_path / "raw")
    for _ in range(3):
        append_jsonl(path, {"kind": "draft", "tokens": 16, "ms": 9.1})
    key, samples = read_timings(path)
    summarise(key, samples, min_samples=3)  # 16 tokens cost what 8 do, but not what 2 do
    samples["draft"] = {(t,): [5.0] * 3 for t in (2, 4, 16)}
    with pytest.warns(UserWarning, match="2 and 16 tokens take 5 and 5 ms"):
        summarise(key, samples, min_samples=3)


def test_unusable_timings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no timings"):
        read_timings(tmp_path / "none")
    key, samples = read_timings(write_raw(tmp_path / "one", verify_batches=(4,)))
    with pytest.raises(ValueError, match="at least 2"):
        summarise(key, samples, min_samples=3)
    key, samples = read_timings(write_raw(tmp_path / "few"))
    with pytest.warns(UserWarning, match="want 30"), pytest.raises(ValueError, match="at least 2"):
        summarise(key, samples, min_samples=30)
    with pytest.raises(ValueError, match="dtype"):
        summarise({k: v for k, v in key.items() if k != "dtype"}, samples, 3)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"kind": "draft", "tokens": 4, "ms": -1.0}, ">= 0"),
        ({"kind": "draft", "tokens": 4, "ms": None}, ">= 0"),
        ({"kind": "drift", "tokens": 4, "ms": 1.0}, "drift"),
        ({"kind": "header", "key": {**ENGINE, "device": "H100"}}, "device is 'H100'"),
    ],
)
def test_bad_raw_rows_are_refused(tmp_path, row, word):
    path = write_raw(tmp_path / "raw")
    append_jsonl(path, row)
    with pytest.raises(ValueError, match=word):
        read_timings(path)
    with pytest.raises(ValueError, match=r"none|header"):
        read_timings(write_trace(tmp_path / "headless", {"kind": "draft", "tokens": 1, "ms": 1}))


def test_latency_file_refusals(tmp_path):
    path = tmp_path / "latency.json"
    with pytest.raises(ValueError, match=r"no latency tables; run .*--target smollm2"):
        read_latency(path, ENGINE)
    record = summarise(*read_timings(write_raw(tmp_path / "raw")), min_samples=3)
    for edit, word in (
        ({"schema": 3}, "schema"),
        ({"draft": None}, "not a table"),
        ({"verify": {"batch": [1, 2]}}, "per_request"),
        ({"draft": {"tokens": [2], "ms": [1.0]}}, "at least 2"),
        ({"other": {"batch": [1, 2], "ms": [1.0, None]}}, "NaN"),
    ):
        write_json(path, {**record, **edit})
        with pytest.raises(ValueError, match=word) as error:
            read_latency(path, ENGINE)
        assert str(path) in str(error.value)
