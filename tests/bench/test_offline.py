"""The benchmarks without a server: recorded drafts, replayed policies, scheduler records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forespark import config as configuration
from forespark.bench import oracle, recorded
from forespark.bench.scheduler import SchedulerBenchmark, prices
from forespark.fore_d.calibrated import Calibration, PostCalibration, PreCalibration
from forespark.record import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
KEY = {"target": "smollm2", "drafter": "forespark", "drafter_sha256": "ab" * 32, "K": 2}
CURVE = [0.1, 0.1]


def calibration(**key) -> Calibration:
    rows = [[1.0], [1.0, 1.0]]
    zeros = [[0.0], [0.0, 0.0]]
    pre = PreCalibration("triangle", rows, zeros, [[9], [9, 9]], [[False], [False] * 2],
                         CURVE, CURVE)  # fmt: skip
    return Calibration(KEY | key, PostCalibration([1.0, 2.0], CURVE, CURVE, [9, 9]), pre)


def write_run(folder: Path, d: int, drafts: list[tuple[int, int, int]]) -> None:
    """One trace of length-d drafts: (request number, anchor position, accepted)."""
    requests = [
        {"id": f"r{number}-x", "pos": pos, "d": d, "v": d, "a": a, "z": [0.5] * d, "l": [1.0] * d}
        for number, pos, a in drafts
    ]
    lines = [
        {"header": {**KEY, "schema": 1, "form": "triangle"}},
        {"step": 0, "requests": requests},
    ]
    path = folder / f"forespark-d{d}.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_anchors_that_every_length_passed_are_joined(tmp_path):
    write_run(tmp_path, 1, [(10, 7, 1), (10, 9, 0), (11, 7, 0)])
    write_run(tmp_path, 2, [(20, 7, 2), (21, 7, 0), (21, 8, 1)])
    drafts = recorded.read_drafts(tmp_path, calibration())
    assert drafts.accepted.tolist() == [[1, 2], [0, 0]], "prompt 0 at 7, prompt 1 at 7"
    p, q = 1 / (1 + np.exp(-0.5)), [1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(-0.5))]
    np.testing.assert_allclose(drafts.pre, [[[p, 0], [p, p * p]]] * 2, rtol=1e-6)
    np.testing.assert_allclose(drafts.post, [[[q[0], 0], [q[0], q[0] * q[1]]]] * 2, rtol=1e-6)
    assert [len(batch) for batch in drafts.batches(1, seed=0, limit=None)] == [1, 1]


def test_traces_that_cannot_be_replayed_are_refused(tmp_path):
    write_run(tmp_path, 1, [(0, 7, 1)])
    with pytest.raises(ValueError, match=r"length 2 .*calibrate\.py --target smollm2"):
        recorded.read_drafts(tmp_path, calibration())
    write_run(tmp_path, 2, [(0, 8, 1)])
    with pytest.raises(ValueError, match="share no anchor"):
        recorded.read_drafts(tmp_path, calibration())
    with pytest.raises(ValueError, match="another drafter"):
        recorded.read_drafts(tmp_path, calibration(drafter_sha256="cd" * 32))


def test_replay_counts_what_a_schedule_brought():
    drafts = recorded.Drafts(
        np.tile(np.array([[0.9, 0.0], [0.9, 0.8]]), (2, 1, 1)),
        np.tile(np.array([[0.9, 0.0], [0.9, 0.8]]), (2, 1, 1)),
        np.array([[1, 2], [0, 0]]),
        recorded.SYNTHETIC,
    )
    costs = prices(2, 2)
    rows = {name: oracle.replay(drafts, costs, name) for name in oracle.POLICIES}
    assert [rows["ar"][x] for x in ("tokens", "drafted", "verified")] == [2, 0, 0]
    assert [rows["dflash2"][x] for x in ("tokens", "drafted", "verified")] == [4, 4, 4]
    assert [rows["oracle"][x] for x in ("tokens", "drafted", "accepted")] == [4, 2, 2]
    assert rows["ar"]["ms"] < rows["oracle"]["ms"] < rows["dflash2"]["ms"]


def test_no_policy_beats_perfect_knowledge_nor_estimates_the_search():
    rng = np.random.default_rng(3)
    costs = prices(4, 6)
    for _ in range(20):
        drafts = recorded.synthetic_drafts(rng, 6, 4)
        rate = {}
        for name in oracle.POLICIES:
            row = oracle.replay(drafts, costs, name)
            rate[name] = row["tokens"] / row["ms"]
        assert max(rate.values()) == pytest.approx(rate["oracle"], rel=1e-12)


def settings(tmp_path, *more):
    sizes = ("batch_sizes=[1,3]", "decisions=3", "schedules=20", "rounds=2", "decision_drafts=3")
    changes = [f"bench.{size}" for size in sizes]
    return configuration.load(["target=smollm2", f"run_dir={tmp_path}", *changes, *more])


def test_scheduler_records_are_complete_and_never_measured_twice(tmp_path):
    def deciders(scores, acceptance, costs):
        assert scores.shape == acceptance.shape and 0 < acceptance.min() <= acceptance.max() < 1
        return {"stock": lambda: 0}

    rng = np.random.default_rng(0)
    drafts = recorded.synthetic_drafts(rng, 40, 3)

    def run(*more):
        out = tmp_path / "out"
        return SchedulerBenchmark(settings(tmp_path, *more), out, drafts, None).run(deciders)

    rows = read_jsonl(run("bench.limit=2") / "records.jsonl")
    times = {(r["n"], r["decider"], r["round"]) for r in rows if r["kind"] == "time"}
    deciders_ = ("plan", "search", "stock")
    assert times == {(n, d, r) for n in (1, 3) for d in deciders_ for r in (0, 1)}
    losses = [r for r in rows if r["kind"] == "loss"]
    assert len(losses) == 2 * 5 and all(0 < r["rate"] <= r["best_rate"] * 1.000001 for r in losses)
    (checked,) = [r for r in rows if r["kind"] == "schedules"]
    assert checked["schedules"] == 20 and not any(checked["broken"].values())
    run("bench.limit=2")
    assert read_jsonl(tmp_path / "out" / "records.jsonl") == rows
    with pytest.raises(ValueError, match="seed .there 0, now 5"):
        run("bench.seed=5")

    command = [
        sys.executable,
        "plot/scheduler.py",
        "--records",
        tmp_path / "out",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "scheduler.md").read_text()
    assert "20 random schedules: 0 broken" in table and "10 batches of synthetic drafts" in table
    assert (tmp_path / "scheduler.pdf").read_bytes()[:4] == b"%PDF"


def test_oracle_records_are_tabulated(tmp_path):
    drafts = recorded.synthetic_drafts(np.random.default_rng(0), 9, 3)
    config = settings(tmp_path, "bench.loads=[1,4]", "bench.limit=2")
    bench = oracle.OracleBenchmark(config, tmp_path / "out", drafts, prices(3, 4))
    bench.run()
    rows = read_jsonl(bench.run() / "records.jsonl")
    assert [(r["load"], r["policy"]) for r in rows] == [
        (n, p) for n in (1, 4) for p in oracle.POLICIES
    ]
    assert {r["steps"] for r in rows} == {2}
    command = [sys.executable, "plot/oracle.py", "--records", tmp_path / "out", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.count("| oracle |") == 2, done.stderr
    config.bench.loads = [64]
    with pytest.raises(ValueError, match="only 9 anchors"):
        oracle.OracleBenchmark(config, tmp_path / "other", drafts, prices(3, 4)).run()
