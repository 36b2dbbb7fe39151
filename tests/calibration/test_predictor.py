"""The predictor benchmark on made-up traces with known answers, and its figures."""

from __future__ import annotations

import csv
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from forespark.calibration.predictor import (
    compare,
    expected_error,
    judge,
    mae_ratio,
    read_full_blocks,
    reliability,
)
from forespark.calibration.run import predictor_quality
from forespark.calibration.store import write_calibration
from forespark.fore_d.calibrated import Calibration, PostCalibration, PreCalibration
from forespark.record import read_json, read_jsonl, write_text

ROOT = Path(__file__).resolve().parents[2]
K = 3
KEY = {"target": "smollm2", "drafter": "forespark", "drafter_sha256": "ab12", "K": K}
HEADER = {"header": {"schema": 1, **KEY, "form": "triangle"}}


def draft(name, pos, a, z=(0.0,) * K, post=(0.0,) * K, d=K, v=K):
    return {"id": name, "pos": pos, "d": d, "v": v, "a": a, "z": list(z)[:d], "l": list(post)[:d]}


def write_trace(path, drafts):
    rows = [HEADER, *({"requests": [one]} for one in drafts)]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def chain(name, counts, logits=lambda a: (0.0,) * K, start=10):
    """Successive full drafts of one request with these accepted counts."""
    found, pos = [], start
    for a in counts:
        found.append(draft(name, pos, a, logits(a), logits(a)))
        pos += a + 1
    return found


def calibration(scale=1.0, theta=1.0):
    rows = [[scale] * d for d in range(1, K + 1)]
    zeros = [[0.0] * d for d in range(1, K + 1)]
    counts = [[9] * d for d in range(1, K + 1)]
    kept = [[False] * d for d in range(1, K + 1)]
    post = PostCalibration([theta] * K, [0.1] * K, [0.1] * K, [9] * K)
    return Calibration(
        dict(KEY), post, PreCalibration("triangle", rows, zeros, counts, kept, [0.1] * K, [0.1] * K)
    )


def test_only_successive_full_drafts_have_a_predecessor(tmp_path):
    drafts = [
        draft("a", 10, 2),  # first: none before it
        draft("a", 13, 0),  # continues: 2
        draft("b", 5, 3),
        draft("a", 20, 1),  # a gap
        draft("a", 22, 1, v=1, d=K),  # cut in verification: no outcome, and none for the next
        draft("a", 24, 3),
        draft("b", 9, 1, d=2, v=2),  # shorter
        draft("b", 11, 2),
        draft("b", 14, 2),  # continues: 2
    ]
    blocks = read_full_blocks(write_trace(tmp_path / "t.jsonl", drafts), KEY)
    assert blocks.accepted.tolist() == [2, 0, 3, 1, 3, 2, 2]
    assert blocks.previous.tolist() == [-1, 2, -1, -1, -1, -1, 2]
    assert blocks.request.tolist() == [0, 0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("drafts", "key", "word"),
    [
        ([draft("a", 10, 2)], KEY, "no two successive drafts"),
        (chain("a", [1, 2]), {**KEY, "drafter_sha256": "ff"}, "drafter_sha256"),
        ([{**d, "l": None} for d in chain("a", [1, 2])], KEY, "both estimators"),
    ],
)
def test_unusable_traces_are_refused(tmp_path, drafts, key, word):
    path = write_trace(tmp_path / "t.jsonl", drafts)
    with pytest.raises(ValueError, match=word):
        read_full_blocks(path, key)


def test_errors_by_hand():
    judged = judge(np.array([0.0, 2.5, 3.0]), np.array([1, 1, 3]), np.array([0.0, 1.0, 2.0]))
    assert judged["mae"] == pytest.approx(2.5 / 3)
    assert judged["within_one"] == pytest.approx(2 / 3)
    assert judged["within"] == pytest.approx([1 / 3, 2 / 3, 1.0])
    # Half a coin: R is 0.5, always half a token off. Two halves: 0.75 off by 0.75, 0.25, 1.25.
    assert expected_error(np.array([[0.5]])) == pytest.approx(0.5)
    wanted = 0.5 * 0.75 + 0.25 * 0.25 + 0.25 * 1.25
    assert expected_error(np.array([[0.5, 0.25]])) == pytest.approx(wanted)
    found = mae_ratio(np.zeros(4), np.full(4, 2.0), np.ones(4), np.array([0, 0, 1, 1]))
    assert found["ratio"] == pytest.approx(1.0) == found["interval"][0] == found["interval"][1]
    assert mae_ratio(np.zeros(2), np.ones(2), np.ones(2), np.arange(2))["ratio"] is None


def test_reliability_by_hand():
    predicted, accepted = np.array([[0.9, 0.2], [0.9, 0.2]]), np.array([2, 0])
    found = reliability(predicted, accepted, bins=2)
    assert found["bins"] == [[2, pytest.approx(0.2), 0.5], [2, pytest.approx(0.9), 0.5]]
    assert found["ece"] == pytest.approx(0.5 * 0.3 + 0.5 * 0.4)
    assert found["ece_by_position"] == pytest.approx([0.4, 0.3])


def test_a_sharp_estimate_beats_the_previous_step(tmp_path):
    def sure(a):
        return tuple(20.0 if j < a else -20.0 for j in range(K))

    drafts = chain("a", [0, 3, 0, 3, 0], sure) + chain("b", [1, 1, 1], sure)
    blocks = read_full_blocks(write_trace(tmp_path / "t", drafts), KEY)
    found = compare(blocks, calibration())
    judged = found["predictors"]
    assert (found["drafts"], found["pairs"], found["requests"]) == (8, 6, 2)
    assert judged["served"]["mae"] < 1e-6 and judged["served"]["within_one"] == 1.0
    assert judged["previous"]["mae"] == pytest.approx(2.0)  # 3, 3, 3, 3, 0, 0
    assert judged["previous"]["within_one"] == pytest.approx(2 / 6)
    constant = np.abs(9 / 8 - np.array([3, 0, 3, 0, 1, 1])).mean()
    assert judged["mean"]["mae"] == pytest.approx(constant)
    assert judged["constant"]["mae"] == pytest.approx(6 / 6)  # always 1: 2, 1, 2, 1, 0, 0
    assert judged["median"]["mae"] == 0.0
    assert found["mae_ratio"]["served"]["ratio"] == pytest.approx(0.0, abs=1e-6)
    assert found["mae_ratio"]["served"]["interval"] is None  # b alone never errs
    assert found["expected_mae"] < 1.0


def test_matched_calibration_repairs_a_biased_estimate(tmp_path):
    rng = np.random.default_rng(0)
    drafts = []
    for r in range(24):
        counts = [int((rng.random(K) < 0.3).cumprod().sum()) for _ in range(40)]
        drafts += chain(f"r{r}", counts, lambda a: tuple(2.0 + 0.1 * rng.standard_normal(K)))
    blocks = read_full_blocks(write_trace(tmp_path / "t", drafts), KEY)
    parts = compare(blocks, calibration(scale=math.log(0.3 / 0.7) / 2.0))["reliability"]
    for estimator in ("pre", "post"):
        assert parts[estimator]["none"]["ece"] > 0.4
    assert parts["pre"]["matched"]["ece"] < 0.08
    assert parts["pre"]["served"]["ece"] < 0.03  # 2 x -0.42 is the logit of 0.3


@pytest.fixture
def measured(tmp_path):
    rng = np.random.default_rng(1)
    drafts = []
    for r in range(8):
        counts = rng.integers(0, K + 1, 12).tolist()
        drafts += chain(f"r{r}", counts, lambda a: tuple(rng.standard_normal(K) + a - 1.5))
    write_calibration(tmp_path / "calibration.json", calibration())
    paths = {"bench": write_trace(tmp_path / "b.jsonl", drafts)}
    paths["calibration"] = write_trace(tmp_path / "c.jsonl", drafts)
    text = predictor_quality(paths, KEY, tmp_path / "calibration.json", tmp_path / "out",
                             bins=15, min_samples=20)  # fmt: skip
    return tmp_path / "out", text


def test_records_say_what_they_were_made_from(measured):
    out, text = measured
    records = read_jsonl(out / "records.jsonl")
    assert [r["prompts"] for r in records] == ["bench", "calibration"]
    assert all(r["K"] == K and r["drafter_sha256"] == "ab12" for r in records)
    run = read_json(out / "run.json")
    assert set(run["traces_sha256"]) == {"bench", "calibration"} and run["provenance"]
    assert "previous" in text and "bench" in text


@pytest.fixture
def plots(monkeypatch):
    """The figure programs, run in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "plot"))

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        importlib.import_module(name).main()

    return run


def test_figures_and_tables(measured, plots, tmp_path):
    out, _ = measured
    for name in ("predictor", "reliability"):
        plots(name, "--records", out, "--out", tmp_path / "figures")
        assert (tmp_path / "figures" / f"{name}.png").read_bytes()[1:4] == b"PNG"
    rows = list(csv.DictReader((tmp_path / "figures" / "predictor.csv").open()))
    record = read_jsonl(out / "records.jsonl")[0]
    assert len(rows) == 2 * 8 * len(record["errors"])
    table = (tmp_path / "figures" / "predictor.md").read_text()
    assert f"| {record['predictors']['served']['mae']:.3f} |" in table
    assert "before calibration" in (tmp_path / "figures" / "reliability.md").read_text()


def test_figures_of_nothing_and_of_another_benchmark(plots, tmp_path):
    plots("reliability", "--records", tmp_path, "--out", tmp_path / "f")
    assert (tmp_path / "f" / "reliability.pdf").exists()
    write_text(tmp_path / "records.jsonl", '{"schema": 1, "bench": "decode"}\n')
    with pytest.raises(ValueError, match="line 1: bench"):
        plots("predictor", "--records", tmp_path, "--out", tmp_path / "f")
