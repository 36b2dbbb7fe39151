"""The decode benchmark end to end on a mock engine: rates, records, resume, failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mock_server import MockEngine, running

from forespark.bench import answers, decode, plan, steptrace
from forespark.bench.client import RequestResult
from forespark.bench.decode import DecodeBenchmark
from forespark.bench.folder import start_run
from forespark.bench.measure import Arm, BatchFailed, summarize
from forespark.bench.plan import Point
from forespark.bench.records import LoadRecord, append_record, read_records
from forespark.config import BenchConfig
from forespark.record import append_jsonl, read_json, read_jsonl

ARM = Arm("ar", "smollm2", "run", None)


def result(first, gaps, tokens_per_chunk=1, end="length"):
    times = [first]
    for gap in gaps:
        times += [times[-1] + gap] * tokens_per_chunk
    return RequestResult("p", 0.0, token_times_s=times, token_ids=[1] * len(times), end=end)


def summary(results, output_tokens=512):
    point = Point(len(results), 0, 0)
    return summarize(results, point, ARM, [None] * 3, None, output_tokens)


def test_rates_count_from_the_release():
    # First tokens at 1 s and 3 s: the barrier opens at 3 s, both end at 5 s.
    early = RequestResult("a", 0.0, token_times_s=[1.0, 4.0, 5.0], end="length")
    late = RequestResult("b", 0.0, token_times_s=[3.0, 4.0, 4.0, 5.0, 5.0], end="length")
    record = summary([early, late])
    assert record.timed_tokens == [2, 4] and record.span_s == [2.0, 2.0]
    assert record.throughput_tokens_per_s == pytest.approx(2 / 2 + 4 / 2)
    assert record.interactivity_tokens_per_s == pytest.approx(1.5)
    assert record.wall_s == 2.0 and record.ttft_s_p50 == 2.0


def test_timing_is_cut_at_the_wanted_tokens():
    record = summary([result(1.0, [0.5] * 10)], output_tokens=4)
    assert record.timed_tokens == [4] and record.span_s == [pytest.approx(2.0)]


def test_request_that_ends_at_its_first_token_has_no_rate():
    record = summary([result(1.0, [], end="stop"), result(1.0, [0.5, 0.5])])
    assert record.timed_tokens == [0, 2]
    assert record.throughput_tokens_per_s == record.interactivity_tokens_per_s == 2.0


def test_a_batch_without_two_tokens_is_no_measurement():
    with pytest.raises(BatchFailed, match="two tokens"):
        summary([result(1.0, [])])


def record(**changes):
    base = summary([result(1.0, [0.5, 0.5])])
    values = {f: getattr(base, f) for f in base.__dataclass_fields__}
    return LoadRecord(**(values | changes))


def test_records_round_trip(tmp_path):
    path = tmp_path / "records.jsonl"
    rows = [record(batch=0, draft_ms=1.5), record(batch=1, drafted_tokens=7)]
    for row in rows:
        append_record(path, row)
    assert read_records(path, LoadRecord) == rows
    assert read_records(tmp_path / "absent.jsonl", LoadRecord) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "line 2: got schema 2"),
        ({"speed": 1}, r"line 2: unknown fields \['speed'\]"),
        ({"batch": 0}, "line 2: point .* is already on line 1"),
    ],
)
def test_reader_names_file_and_line(tmp_path, change, message):
    path = tmp_path / "records.jsonl"
    append_record(path, record(batch=0))
    row = json.loads(path.read_text()) | {"batch": 1} | change
    append_jsonl(path, row)
    with pytest.raises(ValueError, match=message):
        read_records(path, LoadRecord)


def test_nan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        append_record(tmp_path / "records.jsonl", record(wall_s=float("nan")))


# --- plan


def test_small_loads_time_more_batches():
    bench = BenchConfig(loads=[8, 1], requests_per_point=4, arms=["ar"])
    assert [plan.batches(load, bench) for load in plan.loads(bench)] == [4, 1]
    assert plan.wanted_prompts(bench) == 8
    assert plan.points(1, bench)[0] == Point(1, 1, 0)


def test_limit_leaves_large_loads_out():
    assert plan.loads(BenchConfig(loads=[1, 4, 16], limit=4)) == [1, 4]
    with pytest.raises(ValueError, match="leaves no load"):
        plan.loads(BenchConfig(loads=[8], limit=4))


def test_arms_rotate():
    assert plan.rotated(["a", "b", "c"], 4) == ["b", "c", "a"]


def test_a_batch_keeps_its_prompts_when_the_pool_grows(tmp_path):
    from forespark.bench.workloads import Prompt

    prompts = [Prompt(f"p{i}", (("user", "x"),)) for i in range(9)]
    path = tmp_path / "plan.jsonl"
    first = plan.PromptPlan(path, prompts, prompts[:3], 0).prompts(Point(4, 0, 0))
    assert len(first) == 4  # one of three prompts is used twice
    again = plan.PromptPlan(path, prompts, prompts, 0)
    assert again.prompts(Point(4, 0, 0)) == first
    with pytest.raises(ValueError, match=r"not in bench\.prompts"):
        plan.PromptPlan(path, prompts[5:], prompts, 0).prompts(Point(4, 0, 0))


# --- the whole benchmark


def test_endpoint_run_and_resume(config, tmp_path):
    out = tmp_path / "out"
    engine = MockEngine()
    with running(engine) as endpoint:
        DecodeBenchmark(config, out, endpoint).run()
        rows = read_records(out / "records.jsonl", LoadRecord)
        assert [row.key[2:] for row in rows] == [(1, 0, 0), (2, 0, 0), (1, 1, 0), (2, 1, 0)]
        assert all(sum(row.timed_tokens) == 8 * row.load for row in rows)
        # 2 ms a token on a busy machine: never faster than that.
        assert all(0 < row.interactivity_tokens_per_s <= 500 for row in rows)
        # A first token counts as drafted, too, in the mock: 9 per request.
        assert [row.drafted_tokens for row in rows] == [9, 18, 9, 18]
        short = [a for a in answers.read_answers(out / "answers.jsonl").values() if a.error]
        assert len(short) <= 1

        sent = len(engine.requests)
        DecodeBenchmark(config, out, endpoint).run()
        assert (
            len(engine.requests) == sent and read_records(out / "records.jsonl", LoadRecord) == rows
        )

        config.bench.rounds = 3  # a longer run extends the shorter one
        DecodeBenchmark(config, out, endpoint).run()
        assert len(read_records(out / "records.jsonl", LoadRecord)) == 6
    assert len(read_json(out / "run.json")["runs"]) == 2


def test_other_settings_are_refused(config, tmp_path):
    out = tmp_path / "out"
    start_run(config, out, "a", "decode")
    append_record(out / "records.jsonl", record())
    config.bench.output_tokens = 16
    with pytest.raises(ValueError, match=r"output_tokens \(there 8, now 16\)"):
        DecodeBenchmark(config, out, "http://unused")


def test_another_drafter_is_refused(config, tmp_path):
    out = tmp_path / "out"
    folder = Path(config.run_dir) / "drafters" / "forespark"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"one")
    start_run(config, out, "a", "decode")
    append_record(out / "records.jsonl", record())
    (folder / "model.safetensors").write_bytes(b"two")
    with pytest.raises(ValueError, match=r"drafter_sha256\.forespark"):
        DecodeBenchmark(config, out, "http://unused")


def test_a_run_without_records_blocks_nothing(config, tmp_path):
    out = tmp_path / "out"
    start_run(config, out, "a", "decode")
    for name in ("answers.jsonl", "plan.jsonl"):
        (out / name).touch()
    start_run(config, out, "b", "decode")  # the same settings: answers are kept
    assert [run["run_id"] for run in read_json(out / "run.json")["runs"]] == ["a", "b"]
    assert (out / "answers.jsonl").exists()
    config.drafter.num_speculative_tokens = 3  # AR answers do not depend on it
    DecodeBenchmark(config, out, "http://unused")
    start_run(config, out, "c", "decode")
    assert (out / "answers.jsonl").exists() and (out / "plan.jsonl").exists()
    config.bench.output_tokens = 16
    DecodeBenchmark(config, out, "http://unused")
    start_run(config, out, "d", "decode")
    assert [run["run_id"] for run in read_json(out / "run.json")["runs"]] == ["d"]
    assert not (out / "answers.jsonl").exists() and not (out / "plan.jsonl").exists()


@pytest.mark.parametrize("content", ["{}", "[]", '{"fixed": {}}'])
def test_damaged_run_file_is_named(config, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    DecodeBenchmark(config, tmp_path, "http://unused")  # no records: written anew
    append_record(tmp_path / "records.jsonl", record())
    with pytest.raises(ValueError, match=r"run\.json: want an object with"):
        DecodeBenchmark(config, tmp_path, "http://unused")


def test_unfinished_arms(config, tmp_path):
    config.bench.arms, config.bench.loads, config.bench.rounds = ["ar", "dspark"], [1], 1
    append_record(tmp_path / "records.jsonl", record())  # ar, load 1, round 0
    assert DecodeBenchmark(config, tmp_path).unfinished() == ["dspark"]


def test_counters_of_an_arm_without_drafter_are_none(config, tmp_path):
    engine = MockEngine()
    engine.export = False
    config.bench.rounds = 1
    with running(engine) as endpoint:
        DecodeBenchmark(config, tmp_path / "out", endpoint).run()
    assert {
        row.drafted_tokens for row in read_records(tmp_path / "out/records.jsonl", LoadRecord)
    } == {None}


def test_failed_batches_are_kept_apart_and_measured_again(config, tmp_path, monkeypatch):
    out = tmp_path / "out"
    config.bench.rounds = 1
    with running(MockEngine()) as endpoint:
        original = decode.measure

        async def failing(client, prompts, bench, point, arm):
            if point.load == 2:
                raise BatchFailed([RequestResult("p", 0.0, error="engine died")])
            return await original(client, prompts, bench, point, arm)

        monkeypatch.setattr(decode, "measure", failing)
        with pytest.raises(ValueError, match="1 failures"):
            DecodeBenchmark(config, out, endpoint).run()
        assert read_jsonl(out / "errors.jsonl")[0]["error"] == "engine died"
        assert [row.load for row in read_records(out / "records.jsonl", LoadRecord)] == [1]
        monkeypatch.setattr(decode, "measure", original)
        DecodeBenchmark(config, out, endpoint).run()
        assert [row.load for row in read_records(out / "records.jsonl", LoadRecord)] == [1, 2]


def test_no_usable_prompt(config, tmp_path):
    config.bench.output_tokens = 8
    config.bench.max_prompt_tokens = 2  # the mock's prompts have 3
    with running(MockEngine()) as endpoint, pytest.raises(ValueError, match="none of 8 prompts"):
        DecodeBenchmark(config, tmp_path / "out", endpoint).run()


def test_endpoint_of_another_arm_needs_the_ar_answers(config, tmp_path):
    config.bench.arms = ["forespark"]
    with pytest.raises(ValueError, match="measure the arm ar first"):
        DecodeBenchmark(config, tmp_path / "out", "http://unused").run()


def test_step_times_leave_out_prefill_and_torn_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    append_jsonl(path, {"n": 1, "prefill": 0, "verify_ms": 99.0, "draft_ms": 0, "other_ms": 0})
    start = steptrace.end_of(path)
    rows = [
        {"n": 0, "prefill": 50, "verify_ms": 500.0, "draft_ms": 1.0, "other_ms": 1.0},
        {"n": 2, "prefill": 0, "verify_ms": 10.0, "draft_ms": 2.0, "other_ms": None},
        {"n": 4, "prefill": 0, "verify_ms": 20.0, "draft_ms": 4.0, "other_ms": 1.0},
    ]
    for row in rows:
        append_jsonl(path, row)
    with path.open("a") as out:
        out.write('{"n": 4, "prefi')
    times = steptrace.step_times(path, start)
    assert times == steptrace.StepTimes(2, 6, 15.0, 3.0, 1.0)
    assert steptrace.step_times(None, 0) is None
    assert steptrace.step_times(tmp_path / "absent", 0) is None
