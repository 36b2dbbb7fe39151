"""SLO attainment, capacity and rate probing by hand; the benchmark on a mock engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from mock_server import MockEngine, running

from forespark.bench import e2e
from forespark.bench.attainment import (
    attained,
    by_rate,
    capacity,
    compare,
    scale_rate,
    summarize_folder,
)
from forespark.bench.probing import chosen_rates, probe
from forespark.bench.records import SloRecord, append_record, read_records
from forespark.bench.slo import SloBenchmark
from forespark.config import SloConfig
from forespark.record import append_jsonl, read_json

INF = float("inf")


def record(arm="ar", rate=1.0, met=3, missed=1, **changes):
    n = met + missed
    ttft = [0.5] * met + [9.0] * missed
    values = {
        "run_id": "r", "target": "smollm2", "arm": arm, "rate": rate, "round": 0,
        "arrivals": "poisson", "warmup_requests": 0, "prompt_ids": ["p"] * n, "ends": ["stop"] * n,
        "due_s": [0.0] * n, "prompt_tokens": [3] * n, "output_tokens": [5] * n, "ttft_s": ttft,
        "tpot_s": [0.01] * n, "wall_s": 1.0, "lag_s_p99": 0.0,
    }  # fmt: skip
    return SloRecord(**(values | changes))


def test_both_limits_must_hold_and_unknown_is_a_miss():
    row = record(
        met=7, missed=0,
        ttft_s=[1.0, 1.01, 0.5, 0.5, None, 0.5, 0.5],
        tpot_s=[0.05, 0.01, 0.051, None, None, 0.01, 0.01],
        ends=["stop", "length", "stop", "stop", "error", "cancelled", "length"],
    )  # fmt: skip
    assert attained(row, 1.0, 0.05).tolist() == [True, False, False, False, False, False, True]
    assert attained(row, 2.0, 0.1).tolist() == [True, True, True, False, False, False, True]


@pytest.mark.parametrize(
    ("shares", "want"),
    [
        ([1.0, 0.8, 0.5], 1.5),
        ([1.0, 0.9, 0.5], 2.0),
        ([0.95, 0.95, 0.95], INF),
        ([0.89, 1.0, 1.0], None),
        ([1.0, 0.5, 0.95], 1.2),  # the first fall counts
        ([], None),
    ],
)
def test_capacity_is_interpolated(shares, want):
    found = capacity([1.0, 2.0, 3.0][: len(shares)], shares, 0.9)
    assert found == (pytest.approx(want) if want else want)


def test_ratio_of_capacities_with_interval():
    rows = [record("dspark", r, met, 100 - met) for r, met in ((1.0, 100), (2.0, 80), (3.0, 0))]
    rows += [
        record("forespark", r, met, 100 - met) for r, met in ((1.0, 100), (2.0, 100), (3.0, 80))
    ]
    rows += [record("ar", r, 0, 100) for r in (1.0, 2.0, 3.0)]
    found = by_rate(rows, 1.0, 0.05)
    made = compare(found, 0.9)
    assert made["capacities"]["dspark"]["rate"] == pytest.approx(1.5)
    assert made["capacities"]["ar"] == {"rate": None, "interval": None}
    assert made["ratios"]["ar"]["ratio"] is None
    ratio = made["ratios"]["dspark"]
    assert ratio["ratio"] == pytest.approx(2.5 / 1.5)
    low, high = ratio["interval"]
    assert low < ratio["ratio"] < high and high - low < 1
    assert scale_rate(found, 0.9) == 2.0
    assert scale_rate({}, 0.9) is None


def test_never_below_is_above_all(tmp_path):
    for rate in (1.0, 2.0):
        append_record(tmp_path / "records.jsonl", record("forespark", rate, 10, 0))
        append_record(tmp_path / "records.jsonl", record("dspark", rate, 0, 10))
    summary = read_json(summarize_folder(tmp_path, SloConfig()))
    assert summary["capacities"]["forespark"]["rate"] == "above"
    assert summary["ratios"]["dspark"]["ratio"] is None
    assert summary["scale_rate"] == 1.0
    assert summary["scaled"]["forespark"][0] == 0.0 and summary["scaled"]["forespark"][-1] == 1.0


def test_requests_of_all_rounds_count_together():
    rows = [record(met=9, missed=1), record(met=5, missed=5, round=1)]
    assert by_rate(rows, 1.0, 0.05)["ar"][1.0].mean() == pytest.approx(0.7)


@pytest.mark.parametrize("true", [0.3, 1.0, 3.7, 50.0])
def test_a_probe_finds_the_capacity(true):
    asked = []

    async def attainment(rate):
        asked.append(rate)
        return float(np.clip(1.0 - 0.1 * rate / true, 0, 1))  # 0.9 at the true capacity

    found = asyncio.run(probe(attainment, 1.0, 0.9))
    assert found == pytest.approx(true, rel=0.02) and len(asked) <= 10


def test_a_probe_gives_up():
    async def never(rate):
        return 0.0

    with pytest.raises(ValueError, match="stays below 0.9"):
        asyncio.run(probe(never, 1.0, 0.9))


def test_rates_follow_the_rule():
    rates = chosen_rates([8.0, 12.0, 10.0], 8)
    assert rates[:3] == [2.0, 4.0, 6.0] and rates[-1] == 15.0
    assert np.allclose(np.diff(rates[2:]), 1.8)


@pytest.fixture
def slow(config, tmp_path, monkeypatch):
    """Conversations that the mock answers in 30 ms."""
    monkeypatch.setattr(e2e, "token_counter", lambda model: lambda messages: len(messages))
    path = tmp_path / "talks.jsonl"
    script = json.dumps({"first": 0.01, "chunks": [[0, 1], [0.01, 1], [0.01, 1]]})
    for i in range(4):
        texts = (f"{script}{' ' * i}", "yes", script, "no")
        sides = ("user", "assistant") * 2
        rows = [{"role": s, "content": t} for s, t in zip(sides, texts, strict=True)]
        append_jsonl(path, {"messages": rows, "id": i})
    append_jsonl(path, {"messages": [{"role": s, "content": f"{s}"} for s in sides]})
    stream = config.stream
    stream.conversations, stream.held_out, stream.prefix_cache = [f"file:{path}"], 1, False
    stream.output_tokens, stream.max_lag_s = 4, 10.0
    slo = config.slo
    slo.rates, slo.warmup_s, slo.window_s = [20.0, 40.0], 0.1, 0.3
    slo.ttft_s, slo.tpot_s = 2.0, 0.5
    config.bench.rounds = 1
    return config


def test_endpoint_run_and_resume(slow, tmp_path):
    out, engine = tmp_path / "out", MockEngine()
    with running(engine) as endpoint:
        SloBenchmark(slow, out, endpoint).run()
        rows = read_records(out / "records.jsonl", SloRecord)
        sent = len(engine.requests)
        SloBenchmark(slow, out, endpoint).run()
        assert len(engine.requests) == sent
        slow.slo.rates = [20.0, 40.0, 60.0]  # more rates extend it
        SloBenchmark(slow, out, endpoint).run()
    assert [(row.rate, row.warmup_requests, len(row.ends)) for row in rows] == [
        (20, 2, 6),
        (40, 4, 12),
    ]
    assert len(read_records(out / "records.jsonl", SloRecord)) == 3
    for row in rows:
        assert row.due_s == sorted(row.due_s) and all(attained(row, 2.0, 0.5))
        assert all(0.01 <= t < 1 for t in row.ttft_s)
    summary = read_json(summarize_folder(out, slow.slo))
    assert summary["capacities"]["ar"]["rate"] == "above"


def test_rates_of_one_endpoint_must_be_named(slow, tmp_path):
    slow.slo.rates = []
    with pytest.raises(ValueError, match=r"name the rates with slo\.rates"):
        SloBenchmark(slow, tmp_path / "out", "http://unused")


def test_an_unreadable_trace_is_refused_first(slow, tmp_path):
    slow.slo.arrivals = f"file:{tmp_path / 'absent'}"
    with pytest.raises(ValueError, match="no such file"):
        SloBenchmark(slow, tmp_path / "out", "http://unused")


def test_probing_goes_on_where_it_stopped(slow, tmp_path, monkeypatch):
    """Arms that are probed need their files, too, and are probed once."""
    slow.slo.rates, slow.slo.probe_arms, slow.bench.arms = [], ["ar", "forespark"], ["ar"]
    probed = []

    async def probe(self, endpoint, arm):
        probed.append(arm.name)
        if len(probed) == 2:
            raise ValueError("killed")
        return 4.0 * len(probed)

    monkeypatch.setattr(SloBenchmark, "_probe", probe)
    monkeypatch.setattr(
        SloBenchmark, "server", lambda self, *_: nullcontext(SimpleNamespace(endpoint=""))
    )
    made = SloBenchmark(slow, tmp_path)
    assert made.unfinished() == ["ar", "forespark"]
    with pytest.raises(ValueError, match="killed"):
        made._probe_all()
    again = SloBenchmark(slow, tmp_path)
    assert again.rates == [] and read_json(tmp_path / "rates.json")["capacities"] == {"ar": 4.0}
    rates = again._probe_all()
    assert probed == ["ar", "forespark", "forespark"] and rates == chosen_rates([4.0, 12.0], 6)
    assert SloBenchmark(slow, tmp_path).rates == rates
