"""Matched interactivity: values by hand, and the cases in which there is no number."""

from __future__ import annotations

import json
import math
import sys

import pytest

from forespark.bench import compare
from forespark.bench.compare import CurvePoint, best_match, bootstrap, matched, throughput_at
from forespark.bench.records import LoadRecord, append_record
from forespark.record import read_json


def curve(*points):
    return [CurvePoint(2**i, x, y) for i, (x, y) in enumerate(points)]


def test_linear_in_log_interactivity():
    points = curve((100.0, 100.0), (1.0, 200.0))
    assert throughput_at(points, 10.0) == pytest.approx(150.0)
    assert throughput_at(points, 100.0) == 100.0
    assert throughput_at(points, 101.0) is None and throughput_at(points, 0.9) is None


def test_below_half_of_the_peak_is_not_reported():
    points = curve((100.0, 40.0), (10.0, 60.0), (1.0, 100.0))
    assert throughput_at(points, 100.0) is None
    assert throughput_at(points, 10.0) == 60.0


def test_one_point_compares_only_with_a_curve_through_it():
    one = curve((10.0, 30.0))
    assert best_match(one, curve((100.0, 10.0), (1.0, 20.0))).ratio == pytest.approx(2.0)
    assert matched(one, curve((11.0, 10.0))) == []
    assert best_match(one, curve((10.0, 15.0))).ratio == pytest.approx(2.0)


def test_no_overlap_is_no_number():
    assert best_match(curve((100, 10), (90, 12)), curve((50, 20), (40, 30))) is None
    assert best_match([], curve((1, 1))) is None


def test_largest_ratio_may_lie_at_a_half_peak():
    arm = curve((100.0, 100.0), (10.0, 100.0))
    base = curve((100.0, 10.0), (10.0, 100.0))  # reaches 50 inside the segment
    best = best_match(arm, base)
    assert best.ratio == pytest.approx(2.0)
    assert math.log10(best.interactivity) == pytest.approx(2 - 40 / 90)


def test_folded_curve_takes_the_best_value():
    assert throughput_at(curve((10, 50), (20, 60), (10, 70)), 10.0) == 70.0


def test_bootstrap():
    values = {0: 1.0, 1: 2.0, 2: 3.0}
    mean = lambda rounds: sum(values[r] for r in rounds) / len(rounds)  # noqa: E731
    low, high = bootstrap(mean, [0, 1, 2])
    assert 1.0 <= low < 2.0 < high <= 3.0
    assert bootstrap(mean, [0, 1, 2]) == (low, high)
    assert bootstrap(mean, [1]) is None
    assert bootstrap(lambda rounds: None if 0 in rounds else 1.0, [0, 1, 2]) is None


def record(arm, load, round_index, throughput, interactivity, sha="a"):
    return LoadRecord(
        run_id="r", target="t", arm=arm, load=load, round=round_index, batch=0,
        prompt_ids=["p"], timed_tokens=[8], span_s=[1.0], ends=["length"], output_sha256=[sha],
        throughput_tokens_per_s=throughput, interactivity_tokens_per_s=interactivity,
        wall_s=1.0, ttft_s_p50=0.1,
    )  # fmt: skip


def test_summary(tmp_path):
    rows = []
    for r in range(3):
        noise = 1 + 0.02 * r  # hits both arms alike: the paired ratio has no spread
        rows += [record("ar", 1, r, 10 * noise, 10 * noise), record("ar", 4, r, 30 * noise, 8)]
        rows += [record("forespark", 1, r, 20 * noise, 20 * noise, sha="b" if r else "a")]
        rows += [record("forespark", 4, r, 36 * noise, 9)]
    for row in rows:
        append_record(tmp_path / "records.jsonl", row)
    summary = read_json(compare.summarize_folder(tmp_path))
    (pair,) = [p for p in summary["pairs"] if (p["arm"], p["base"]) == ("forespark", "ar")]
    assert pair["loads"]["1"]["throughput_ratio"] == pytest.approx(2.0)
    assert pair["loads"]["1"]["throughput_interval"] == pytest.approx([2.0, 2.0])
    assert pair["loads"]["4"]["throughput_ratio"] == pytest.approx(1.2)
    assert pair["best"]["ratio"] > 1.0
    best = summary["best_over_strongest"]
    assert best["base"] == "ar" and best["ratio"] == pytest.approx(pair["best"]["ratio"])
    assert summary["same_outputs_as_ar"] == {"forespark": {"requests": 6, "same": 4}}


def test_a_baseline_faster_than_any_match_is_still_the_strongest(tmp_path):
    """AR's slowest users are faster than ours: a ratio to DSpark there flatters nobody."""
    curves = {"ar": [(10, 10), (60, 5)], "dspark": [(10, 10), (20, 4)],
              "forespark": [(11, 10), (58, 4)]}  # fmt: skip
    for arm, points in curves.items():
        for load, (throughput, interactivity) in zip((1, 16), points, strict=True):
            append_record(
                tmp_path / "records.jsonl", record(arm, load, 0, throughput, interactivity)
            )
    summary = read_json(compare.summarize_folder(tmp_path))
    (pair,) = [p for p in summary["pairs"] if (p["arm"], p["base"]) == ("forespark", "dspark")]
    assert pair["best"]["ratio"] == pytest.approx(2.9)
    best = summary["best_over_strongest"]
    assert best["base"] == "ar" and best["ratio"] < 1.1


def test_summary_of_one_arm_and_of_nothing(tmp_path):
    assert read_json(compare.summarize_folder(tmp_path))["pairs"] == []
    append_record(tmp_path / "records.jsonl", record("ar", 1, 0, 1.0, 1.0))
    assert read_json(compare.summarize_folder(tmp_path))["pairs"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"throughput_tokens_per_s": "fast"}, "line 2: throughput_tokens_per_s: got 'fast'"),
        ({"timed_tokens": 8}, "line 2: timed_tokens: got 8, want list"),
        ({"timed_tokens": ["z"]}, "line 2: timed_tokens: got"),
        ({"arm": None}, "line 2: arm: got None, want str"),
        ({"load": 1.5}, "line 2: load: got 1.5, want int"),
        ({"decode_steps": "z"}, "line 2: decode_steps: got 'z'"),
    ],
)
def test_command_names_the_damaged_field(tmp_path, change, message, monkeypatch, capsys):
    path = tmp_path / "records.jsonl"
    append_record(path, record("ar", 1, 0, 1.0, 1.0))
    row = json.loads(path.read_text()) | {"batch": 1} | change
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "summary.json").exists()


def test_command_refuses_a_missing_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2 and "no records.jsonl there" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
