"""The streaming client against a server whose delays are known.

Each case catches a way in which token times go wrong: tokens counted by chunk, the usage
chunk counted as a token, a failed stream taken for a finished one, TTFT from the send.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from mock_server import MockEngine, running

from forespark.bench.client import Client, RequestResult, clock, parse_counters
from forespark.bench.workloads import Prompt

# Delays are slept by an event loop on a shared machine: never early, seldom 60 ms late.
LATE_S = 0.06


def prompt(**script) -> Prompt:
    return Prompt(str(abs(hash(json.dumps(script)))), (("user", json.dumps(script)),))


def ask(*prompts, batch=False, max_tokens=16, due_s=None):
    async def go(endpoint):
        async with Client(endpoint, timeout_s=5) as client:
            if batch:
                return await client.batch(
                    list(prompts), max_tokens=max_tokens, temperature=0.0, seed=0
                )
            return [
                await client.chat(
                    p, max_tokens=max_tokens, into=RequestResult(p.id, due_s or clock())
                )
                for p in prompts
            ]

    engine = MockEngine()
    with running(engine) as endpoint:
        return asyncio.run(go(endpoint)), engine


def test_multi_token_chunks_are_counted_by_token():
    (result,), engine = ask(prompt(first=0.1, chunks=[[0, 1], [0.1, 3], [0.1, 4]]))
    assert result.output_tokens == 8 and result.token_ids == list(range(8))
    assert result.end == "length" and result.error is None and result.prompt_tokens == 3
    assert 0.1 <= result.ttft_s < 0.1 + LATE_S
    assert 0.2 / 7 - 0.001 <= result.tpot_s < (0.2 + LATE_S) / 7
    assert len(set(result.token_times_s)) == 3  # tokens of a chunk share its time
    assert engine.requests[0]["return_token_ids"] is True


@pytest.mark.parametrize("usage", ["every", "end"])
def test_without_token_ids_usage_decides(usage):
    (result,), _ = ask(prompt(ids=False, usage=usage, chunks=[[0, 1], [0.05, 3], [0.05, 4]]))
    assert result.output_tokens == 8
    assert result.ttft_s < result.token_times_s[-1] - result.due_s


def test_single_token_has_no_tpot():
    (result,), _ = ask(prompt(chunks=[[0, 1]], finish="stop"))
    assert result.output_tokens == 1 and result.tpot_s is None and result.end == "stop"


def test_no_token_at_all():
    (result,), _ = ask(prompt(chunks=[], finish="stop"))
    assert result.output_tokens == 0 and result.ttft_s is None and result.error is None


@pytest.mark.parametrize(
    ("fail", "message"),
    [("http", "HTTP 400"), ("stream", "engine died"), ("drop", "without a finish reason")],
)
def test_failures_are_kept(fail, message):
    (result,), _ = ask(prompt(fail=fail, chunks=[[0, 1], [0.01, 1]]))
    assert result.end == "error" and message in result.error


def test_slow_start_counts_from_the_due_time():
    due_s = clock() - 0.5
    (result,), _ = ask(prompt(first=0.2, chunks=[[0, 1], [0, 1]]), due_s=due_s)
    assert result.ttft_s >= 0.7


def test_batch_goes_through_the_barrier():
    fast = prompt(first=0.0, chunks=[[0, 1], [0.1, 2]])
    slow = prompt(first=0.3, chunks=[[0, 1], [0.1, 2]])
    results, engine = ask(fast, slow, batch=True)
    assert [b["vllm_xargs"]["forespark_barrier"] for b in engine.requests] == [2, 2]
    assert all(r.error is None for r in results)
    assert abs(results[0].token_times_s[-1] - results[1].token_times_s[-1]) < LATE_S


def test_one_failure_ends_the_batch_instead_of_hanging_it():
    good = prompt(first=0.0, chunks=[[0, 1], [0.1, 2]])
    bad = prompt(fail="http")
    results, _ = ask(good, bad, batch=True)
    assert results[1].error.startswith("HTTP 400")
    assert results[0].end == "cancelled" and "another request" in results[0].error


def test_batch_timeout():
    endless = [prompt(first=9.0), prompt(first=9.0, finish="stop")]

    async def go(endpoint):
        async with Client(endpoint, timeout_s=0.3) as client:
            return await client.batch(endless, max_tokens=4, temperature=0.0, seed=0)

    with running(MockEngine()) as endpoint:
        results = asyncio.run(go(endpoint))
    assert all(r.error for r in results)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [("http://127.0.0.1:9", r"Connect call failed \(.*\)"), ("nonsense", "not an http:// address")],
)
def test_no_server(endpoint, why):
    async def go():
        async with Client(endpoint):
            pass

    with pytest.raises(ValueError, match=rf"server answers there \({why}\); start one"):
        asyncio.run(go())


def test_counters_are_summed_over_labels():
    text = '# TYPE a counter\na_total{x="1} 2"} 3.0\na_total{x="2"} 4\nb_total 5e0 1700\nc 1\n'
    assert parse_counters(text, ("a_total", "b_total")) == {"a_total": 7.0, "b_total": 5.0}


def test_hash_covers_all_ids():
    a, b = RequestResult("p", 0.0, token_ids=[1, 2]), RequestResult("p", 0.0, token_ids=[12])
    assert a.output_sha256 != b.output_sha256
