"""The sweep over loads and caps, on an engine that only pretends: points, resume, counting."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from forespark import config as configuration
from forespark import record
from forespark.serving import sweep
from forespark.serving.inprocess import Request

K = 2
KEY = {"target": "smollm2", "K": K}


class FakeEngine:
    """Every step takes 10 ms and emits 1 + cap tokens a request; ramp-up and tail differ."""

    def __init__(self, config):
        self.config, self.steps, self.loads = config, [], []
        self.planner = SimpleNamespace(force_length=config.serve.force_length)
        self.scheduler = SimpleNamespace(dynamic_sd_lookup=[9] * 5)

    def cap(self):
        if self.config.serve.force_length is not None:
            return self.planner.force_length
        return self.scheduler.dynamic_sd_lookup[3]

    def clear(self):
        self.steps.clear()

    def run(self, requests, load):
        self.loads.append((load, len(requests), requests[0].max_tokens))
        batches = [load - 1, load, load, max(load - 1, 0)]
        self.steps += [
            {"batch": b, "n": b, "accepted": b * self.cap(), "t": 0.01 * i}
            for i, b in enumerate(batches)
        ]


@pytest.fixture
def started(monkeypatch):
    """Fake engines that were started, in order."""
    engines = []

    @contextmanager
    def open_engine(config, **options):
        assert options["enable_prefix_caching"] is options["calibration"] is False
        engines.append(FakeEngine(config))
        yield engines[-1]

    monkeypatch.setattr(sweep, "open_engine", open_engine)
    monkeypatch.setattr(sweep, "latency_key", lambda config: KEY)
    requests = [Request([1], 32)] * 3
    monkeypatch.setattr(sweep, "chat_requests", lambda config, engine, prompts: requests)
    return engines


def settings(*overrides):
    base = ["calibrate.cap_loads=[4,1]", f"drafter.num_speculative_tokens={K}"]
    return configuration.load([*base, *overrides])


def test_every_cap_at_every_load_counts_full_batches_only(started, tmp_path):
    path = tmp_path / "caps.jsonl"
    sweep.sweep_caps(settings("calibrate.caps=[bw,bw_stock]"), [], path)
    ours, stock = started
    assert (ours.config.arm.draft, ours.config.arm.verify) == ("full", "full")
    assert (stock.config.arm.draft, stock.config.arm.verify) == ("full", "capped")
    assert stock.config.serve.force_length is None
    rows = record.read_jsonl(path)[1:]
    for arm in ("bw", "bw_stock"):
        found = [(r["load"], r["cap"], r["tokens"]) for r in rows if r["arm"] == arm]
        assert found == [(load, k, 2 * load * (1 + k)) for load in (1, 4) for k in range(K + 1)]
    assert all(row["ms"] == pytest.approx(20.0) for row in rows)
    # A short warm-up, then the few prompts again and again until twice the load.
    assert ours.loads[0] == (4, 3, sweep.WARM_TOKENS) and ours.loads[-1] == (4, 8, 32)


def test_a_stopped_sweep_resumes_and_another_one_starts_over(started, tmp_path):
    path = tmp_path / "caps.jsonl"
    config = settings("calibrate.caps=[bw]", "calibrate.cap_rounds=2")
    sweep.sweep_caps(config, [], path)
    whole = record.read_jsonl(path)
    assert len(whole) == 1 + 2 * 2 * (K + 1)
    record.write_text(path, "")
    for row in whole[:-3]:
        record.append_jsonl(path, row)
    sweep.sweep_caps(config, [], path)
    assert record.read_jsonl(path) == whole and len(started) == 2
    sweep.sweep_caps(config, [], path)
    assert len(started) == 2, "nothing was left to measure, yet an engine started"
    sweep.sweep_caps(settings("calibrate.caps=[bw]", "calibrate.max_tokens=8"), [], path)
    assert len(started) == 3 and len(record.read_jsonl(path)) == 1 + 2 * (K + 1)
