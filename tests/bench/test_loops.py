"""Closed and open loops against a server with known delays.

Delays are slept by an event loop on a shared machine, so a measured time may be longer than
the script says by what one wake-up costs, and is never shorter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest
from mock_server import MockEngine, running

from forespark.bench.attainment import attained
from forespark.bench.client import Client
from forespark.bench.loops import ClosedLoop, LagMeter, open_loop
from forespark.bench.records import SloRecord
from forespark.bench.workloads import Prompt

LATE = 0.06


def prompts(**script):
    return (Prompt(f"p{i}", (("user", json.dumps(script)),)) for i in itertools.count())


def sender(client, max_tokens=64):
    async def send(prompt, result):
        return await client.chat(prompt, max_tokens=max_tokens, into=result)

    return send


def closed(load, warm, measured, engine=None, **limits):
    limits = {"warmup_s": 0.1, "requests": 4, "window_s": 0.0} | limits

    async def go(endpoint):
        async with Client(endpoint, timeout_s=5) as client:

            async def observe():
                return len(engine.requests)

            loop = ClosedLoop(client, sender(client), warm, measured, observe)
            return loop, await loop.run(load, **limits)

    engine = engine or MockEngine()
    with running(engine) as endpoint:
        return (*asyncio.run(go(endpoint)), engine)


def test_window_holds_the_first_requests_of_the_sequence_whatever_their_length():
    long = {"first": 0.05, "chunks": [[0.4, 1], [0.4, 1]]}
    short = {"first": 0.01, "chunks": [[0.02, 2]] * 3}
    sequence = [long, *[short] * 40]
    measured = iter([Prompt(f"m{i}", (("user", json.dumps(s)),)) for i, s in enumerate(sequence)])
    loop, window, engine = closed(2, prompts(**short), measured, requests=3)
    ids = [r.prompt_id for r in window.ended]
    assert {"m0", "m1", "m2"} <= set(ids) and all(i.startswith("m") for i in ids)
    assert window.end_s - window.start_s >= 0.85  # the long one is waited for
    assert engine.most_active == 2
    # The other client goes on meanwhile, and its tokens count.
    assert window.tokens >= 2 + 6 * (len(ids) - 1) and len(ids) > 5
    assert window.before < window.after
    assert [r.end for r in loop.results if not r.done] == ["cancelled"] * 2 or len(ids) < 41


def test_a_failure_ends_the_window():
    fails = {"fail": "http"}
    loop, window, _ = closed(2, prompts(first=0.01, chunks=[[0, 1]]), prompts(**fails),
                             requests=1000, window_s=60.0)  # fmt: skip
    assert window.end_s - window.start_s < 5
    assert any("HTTP 400" in (result.error or "") for result in loop.results)


def test_warm_up_waits_for_the_batch():
    slow = prompts(first=0.3, chunks=[[0.5, 1]])
    began = time.monotonic()
    _, window, engine = closed(3, slow, prompts(first=0.01, chunks=[[0, 1]]), warmup_s=0.0)
    assert engine.most_active == 3 and window.warmup_s < time.monotonic() - began


def slo_record(results):
    return SloRecord(
        run_id="r", target="mock", arm="ar", rate=1.0, round=0, arrivals="poisson",
        warmup_requests=0, prompt_ids=[r.prompt_id for r in results],
        ends=[r.end for r in results], due_s=[r.due_s for r in results],
        prompt_tokens=[r.prompt_tokens for r in results],
        output_tokens=[r.output_tokens for r in results], ttft_s=[r.ttft_s for r in results],
        tpot_s=[r.tpot_s for r in results], wall_s=1.0, lag_s_p99=0.0,
    )  # fmt: skip


def opened(scripts, due, patience_s=5.0):
    asked = [Prompt(f"p{i}", (("user", json.dumps(s)),)) for i, s in enumerate(scripts)]

    async def go(endpoint):
        async with Client(endpoint, timeout_s=5) as client:
            return await open_loop(sender(client), asked, due, patience_s=patience_s)

    engine = MockEngine()
    with running(engine) as endpoint:
        return asyncio.run(go(endpoint))


def test_open_loop_sends_on_time_whatever_the_server_does():
    scripts = [{"first": 0.6, "chunks": [[0, 1], [0.1, 3]]}] * 5
    due = [0.0, 0.1, 0.2, 0.3, 0.4]
    results, lag_s = opened(scripts, due)
    assert [r.end for r in results] == ["length"] * 5 and lag_s < LATE
    start = results[0].due_s
    for result, at in zip(results, due, strict=True):
        assert result.due_s - start == pytest.approx(at)
        assert 0 <= result.sent_s - result.due_s < LATE
        assert result.ttft_s == pytest.approx(0.6, abs=LATE)
        assert result.tpot_s == pytest.approx(0.1 / 3, abs=LATE / 3)


def test_open_loop_gives_up_on_who_is_late():
    results, _ = opened([{"first": 0.05, "chunks": [[0, 1], [0.01, 1]]},
                         {"first": 30.0, "chunks": [[0, 1]]},
                         {"first": 0.05, "chunks": [[0, 1], [30.0, 1]]},
                         {"fail": "http"}], [0.0, 0.01, 0.02, 0.03], patience_s=0.5)  # fmt: skip
    assert [r.end for r in results] == ["length", "cancelled", "cancelled", "error"]
    assert results[1].ttft_s is None and results[2].ttft_s is not None


def test_a_busy_client_is_noticed():
    async def busy():
        meter = LagMeter()
        async with meter.watch():
            for _ in range(5):
                await asyncio.sleep(0.05)
                time.sleep(0.15)
            await asyncio.sleep(0.05)
        return meter.p99_s()

    assert asyncio.run(busy()) > 0.1
    assert LagMeter().p99_s() == 0.0


def test_known_delays_are_measured_within_two_percent():
    """Long delays, so that a late wake-up is small beside them; all at the same time."""
    chunks = [[0, 1], [2.5, 4], [0.5, 3]]
    kinds = [
        {"first": 3.0, "chunks": chunks},
        {"first": 3.0, "chunks": chunks, "ids": False, "usage": "every"},
        {"first": 3.0, "chunks": [[0, 1]] + [[0.75, 1]] * 4, "ids": False, "usage": "none"},
        {"first": 3.0, "chunks": chunks, "fail": "stream"},
        {"first": 3.0, "chunks": [], "finish": "stop"},
    ]
    results, _ = opened(kinds, [0.0, 0.1, 0.2, 0.3, 0.4], patience_s=30.0)
    ttft = [r.ttft_s for r in results]
    assert ttft[:4] == pytest.approx([3.0] * 4, rel=0.02) and ttft[4] is None
    assert [r.tpot_s for r in results[:3]] == pytest.approx([3 / 7, 3 / 7, 0.75], rel=0.02)
    assert [r.output_tokens for r in results] == [8, 8, 5, 1, 0]
    assert [r.end for r in results] == ["length", "length", "length", "error", "stop"]
    record = slo_record(results)
    assert attained(record, 3.1, 0.5).tolist() == [True, True, False, False, False]
    assert attained(record, 2.9, 0.5).sum() == 0


def test_throughput_and_rates_of_the_window():
    # Three clients out of step, 10 tokens every 2 s each; the window is whole periods long.
    script = {"first": 1.0, "chunks": [[0, 1], *[[0.1, 1]] * 9]}
    _, window, _ = closed(3, prompts(**script), prompts(**script), requests=6, window_s=7.6)
    # 1.9 s an answer, so four of each client's in the window.
    rate = window.tokens / (window.end_s - window.start_s)
    assert rate == pytest.approx(3 * 10 / 1.9, rel=0.04)
    spans = [r.token_times_s[-1] - r.token_times_s[0] for r in window.ended]
    assert [9 / s for s in spans] == pytest.approx([10.0] * len(spans), rel=0.04)
