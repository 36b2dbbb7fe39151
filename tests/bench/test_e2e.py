"""The closed-loop benchmarks end to end on a mock engine: records, resume, refusals."""

from __future__ import annotations

import pytest
from mock_server import MockEngine, running

from forespark.bench import e2e
from forespark.bench.compare import summarize_folder
from forespark.bench.e2e import ClosedLoopBenchmark, QuestionBenchmark
from forespark.bench.records import LoadRecord, read_records
from forespark.record import append_jsonl, read_json, read_jsonl


@pytest.fixture
def talks(config, tmp_path, monkeypatch):
    monkeypatch.setattr(e2e, "token_counter", lambda model: lambda messages: len(messages))
    path = tmp_path / "talks.jsonl"
    for i in range(12):
        sides = ("user", "assistant") * 2
        messages = [{"role": s, "content": f"{s} {i}.{t}"} for t, s in enumerate(sides)]
        append_jsonl(path, {"messages": messages})
    stream = config.stream
    stream.conversations, stream.questions = [f"file:{path}"], [f"file:{path}"]
    stream.held_out, stream.turn_spacing, stream.output_tokens = 2, 3, 8
    stream.warmup_s, stream.window_s, stream.window_requests = 0.05, 0.1, 3
    stream.window_per_client, stream.max_lag_s, stream.prefix_cache = 2, 10.0, True
    config.bench.rounds = 2
    return config


def test_endpoint_run_and_resume(talks, tmp_path):
    out, engine = tmp_path / "out", MockEngine()
    with running(engine) as endpoint:
        ClosedLoopBenchmark(talks, out, endpoint).run()
        rows = read_records(out / "records.jsonl", LoadRecord)
        assert [row.key[2:] for row in rows] == [(1, 0, 0), (2, 0, 0), (1, 1, 0), (2, 1, 0)]
        sent = len(engine.requests)
        ClosedLoopBenchmark(talks, out, endpoint).run()
        assert len(engine.requests) == sent and engine.resets == 4
    for row in rows:
        assert row.bench == "e2e" and len(row.prompt_ids) >= (3, 4)[row.load - 1]
        assert row.window_tokens >= sum(row.timed_tokens) and row.warmup_s >= 0.05
        assert row.throughput_tokens_per_s == pytest.approx(row.window_tokens / row.wall_s)
        assert 0 < row.interactivity_tokens_per_s <= 500  # 2 ms a token, or slower
        assert all(t == 7 for t in row.timed_tokens) and all(0 < t < 5 for t in row.ttft_s)
        assert row.drafted_tokens >= sum(row.timed_tokens)
    run = read_json(out / "run.json")
    assert run["bench"] == "e2e" and run["fixed"]["stream.turn_spacing"] == 3
    summary = read_json(summarize_folder(out))
    assert summary["best_over_strongest"] is None


def test_every_arm_meets_the_same_sequence(talks, tmp_path):
    def prompts(arm):
        talks.bench.arms = [arm]
        with running(MockEngine()) as endpoint:
            ClosedLoopBenchmark(talks, tmp_path / arm, endpoint).run()
        rows = read_records(tmp_path / arm / "records.jsonl", LoadRecord)
        return {(row.load, row.round): row.prompt_ids for row in rows}

    ar, ours = prompts("ar"), prompts("forespark")
    for key in ar:
        assert set(ar[key][:3]) & set(ours[key]) == set(ar[key][:3])
    assert set(ar[1, 0][:3]).isdisjoint(ar[1, 1][:3])  # rounds go on in the sequence


def test_questions_have_one_turn_and_no_prefix_cache(talks, tmp_path):
    engine = MockEngine()
    with running(engine) as endpoint:
        QuestionBenchmark(talks, tmp_path / "out", endpoint).run()
    assert engine.resets == 0 and {len(r["messages"]) for r in engine.requests} == {1}
    (bench,) = {row.bench for row in read_records(tmp_path / "out/records.jsonl", LoadRecord)}
    assert bench == "mathcode"
    with pytest.raises(ValueError, match=r"bench \(there 'mathcode', now 'e2e'\)"):
        ClosedLoopBenchmark(talks, tmp_path / "out", "http://unused")


def test_a_client_without_a_processor_is_no_measurement(talks, tmp_path):
    talks.stream.max_lag_s, talks.bench.rounds = 1e-9, 1
    with running(MockEngine()) as endpoint, pytest.raises(ValueError, match="2 failures"):
        ClosedLoopBenchmark(talks, tmp_path / "out", endpoint).run()
    errors = read_jsonl(tmp_path / "out/errors.jsonl")
    assert all("invalid: the load generator was" in row["error"] for row in errors)
    assert read_records(tmp_path / "out/records.jsonl", LoadRecord) == []


def test_other_streams_are_refused(talks, tmp_path):
    with running(MockEngine()) as endpoint:
        ClosedLoopBenchmark(talks, tmp_path / "out", endpoint).run()
    talks.stream.turn_spacing = 4
    with pytest.raises(ValueError, match=r"stream\.turn_spacing \(there 3, now 4\)"):
        ClosedLoopBenchmark(talks, tmp_path / "out", "http://unused")


def test_token_counter_counts_the_template(tmp_path):
    from pathlib import Path

    model = Path(__file__).resolve().parents[2] / "models/smollm2"
    if not model.is_dir():
        pytest.skip("the embedded target is not here")
    count = e2e.token_counter(str(model))
    short, longer = ([{"role": "user", "content": text}] for text in ("hi", "hi " * 50))
    assert 0 < count(short) < count(longer) - 40
