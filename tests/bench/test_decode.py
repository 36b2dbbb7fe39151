"""The decode benchmark end to end on a mock engine: rates, records, resume, failures."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from mock_server import MockEngine, running

from forespark import process
from forespark.bench import answers, decode, plan, server, steptrace
from forespark.bench.client import RequestResult
from forespark.bench.decode import DecodeBenchmark
from forespark.bench.measure import Arm, BatchFailed, summarize
from forespark.bench.plan import Point
from forespark.bench.records import DecodeRecord, append_record, read_records
from forespark.config import BenchConfig, load
from forespark.record import append_jsonl, read_json, read_jsonl

MOCK = Path(__file__).with_name("mock_server.py")
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
    return DecodeRecord(**(values | changes))


def test_records_round_trip(tmp_path):
    path = tmp_path / "records.jsonl"
    rows = [record(batch=0, draft_ms=1.5), record(batch=1, drafted_tokens=7)]
    for row in rows:
        append_record(path, row)
    assert read_records(path) == rows
    assert read_records(tmp_path / "absent.jsonl") == []


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
        read_records(path)


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


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(steptrace, "_SETTLE_S", 0.0)  # the mock writes no trace
    prompts = tmp_path / "prompts.jsonl"
    for i in range(6):
        append_jsonl(prompts, {"prompt": f"tell me about number {i}"})
    append_jsonl(prompts, {"prompt": json.dumps({"chunks": [[0, 1], [0, 1]], "finish": "stop"})})
    append_jsonl(prompts, {"prompt": json.dumps({"fail": "http"})})
    return load(
        [
            "target=smollm2",
            f"bench.prompts=['file:{prompts}']",
            "bench.loads=[1,2]",
            "bench.arms=[ar]",
            "bench.output_tokens=8",
            "bench.min_answer_tokens=9",
            "bench.rounds=2",
            "bench.requests_per_point=0",
            "bench.warmup_tokens=1",
            f"run_dir='{tmp_path / 'run'}'",
        ]
    )


def test_endpoint_run_and_resume(config, tmp_path):
    out = tmp_path / "out"
    engine = MockEngine()
    with running(engine) as endpoint:
        DecodeBenchmark(config, out, endpoint).run()
        rows = read_records(out / "records.jsonl")
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
        assert len(engine.requests) == sent and read_records(out / "records.jsonl") == rows

        config.bench.rounds = 3  # a longer run extends the shorter one
        DecodeBenchmark(config, out, endpoint).run()
        assert len(read_records(out / "records.jsonl")) == 6
    assert len(read_json(out / "run.json")["runs"]) == 2


def test_other_settings_are_refused(config, tmp_path):
    out = tmp_path / "out"
    decode.start_run(config, out, "a")
    append_record(out / "records.jsonl", record())
    config.bench.output_tokens = 16
    with pytest.raises(ValueError, match=r"output_tokens \(there 8, now 16\)"):
        DecodeBenchmark(config, out, "http://unused")


def test_another_drafter_is_refused(config, tmp_path):
    out = tmp_path / "out"
    folder = Path(config.run_dir) / "drafters" / "forespark"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"one")
    decode.start_run(config, out, "a")
    append_record(out / "records.jsonl", record())
    (folder / "model.safetensors").write_bytes(b"two")
    with pytest.raises(ValueError, match=r"drafter_sha256\.forespark"):
        DecodeBenchmark(config, out, "http://unused")


def test_a_run_without_records_blocks_nothing(config, tmp_path):
    out = tmp_path / "out"
    decode.start_run(config, out, "a")
    for name in ("answers.jsonl", "plan.jsonl"):
        (out / name).touch()
    decode.start_run(config, out, "b")  # the same settings: answers are kept
    assert [run["run_id"] for run in read_json(out / "run.json")["runs"]] == ["a", "b"]
    assert (out / "answers.jsonl").exists()
    config.drafter.num_speculative_tokens = 3  # AR answers do not depend on it
    DecodeBenchmark(config, out, "http://unused")
    decode.start_run(config, out, "c")
    assert (out / "answers.jsonl").exists() and (out / "plan.jsonl").exists()
    config.bench.output_tokens = 16
    DecodeBenchmark(config, out, "http://unused")
    decode.start_run(config, out, "d")
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
    assert {row.drafted_tokens for row in read_records(tmp_path / "out/records.jsonl")} == {None}


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
        assert [row.load for row in read_records(out / "records.jsonl")] == [1]
        monkeypatch.setattr(decode, "measure", original)
        DecodeBenchmark(config, out, endpoint).run()
        assert [row.load for row in read_records(out / "records.jsonl")] == [1, 2]


def test_no_usable_prompt(config, tmp_path):
    config.bench.output_tokens = 8
    config.bench.max_prompt_tokens = 2  # the mock's prompts have 3
    with running(MockEngine()) as endpoint, pytest.raises(ValueError, match="none of 8 prompts"):
        DecodeBenchmark(config, tmp_path / "out", endpoint).run()


def test_endpoint_of_another_arm_needs_the_ar_answers(config, tmp_path):
    config.bench.arms = ["forespark"]
    with pytest.raises(ValueError, match="measure the arm ar first"):
        DecodeBenchmark(config, tmp_path / "out", "http://unused").run()


# --- servers


def mock_server(tmp_path, mode="serve", timeout_s=20.0, port=0):
    import socket

    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    command = [sys.executable, str(MOCK), "--port", str(port), f"mock.mode={mode}"]
    return server.Server(
        command, host="127.0.0.1", port=port, log=tmp_path / "log", ready_timeout_s=timeout_s
    )


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"


def test_server_with_children_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_STOP_S", 0.3)
    monkeypatch.setattr(process, "ORPHAN_S", 0.3)  # it ignores SIGTERM, so this is waited for
    pids = []

    def use_and_fail():
        with mock_server(tmp_path, "stubborn") as served:
            pids.extend([served.process.pid, int((tmp_path / "log").read_text().split()[1])])
            assert served.alive()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        use_and_fail()
    time.sleep(0.1)
    assert all(gone(pid) for pid in pids)


def test_children_of_a_server_that_died_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "ORPHAN_S", 0.3)
    with mock_server(tmp_path, "stubborn") as served:
        child = int((tmp_path / "log").read_text().split()[1])
        os.kill(served.process.pid, 9)
        served.process.wait()
    assert gone(child)


def test_server_that_dies_shows_its_log(tmp_path, capsys):
    with pytest.raises(ValueError, match="ended with exit code 3"), mock_server(tmp_path, "die"):
        pass
    assert "could not load the drafter" in capsys.readouterr().err


def test_server_that_is_never_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "healthy", lambda url: False)
    with (
        pytest.raises(ValueError, match="not ready after 1 s"),
        mock_server(tmp_path, timeout_s=1) as served,
    ):
        assert served is None


def test_used_port_is_refused(tmp_path):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(OSError, match=f"port {port} .* cannot be used"),
            mock_server(tmp_path, port=port),
        ):
            pass


def test_serve_command_passes_what_differs(tmp_path):
    folder = "models/it's mine"
    config = load(
        [
            "target=smollm2",
            f"drafter.dir={server.quote(folder)}",
            "target.max_num_seqs=4",
            "bench.rounds=9",
            "serve.port=8123",
        ]
    )
    command = server.serve_command(config, "forespark", trace=tmp_path / "t.jsonl")
    text = " ".join(command)
    assert "--target smollm2 --arm forespark --port 8123" in text
    assert "target.max_num_seqs=4" in command and "bench.rounds" not in text
    assert "--scheduler-cls forespark.serving.barrier.BarrierScheduler" in text
    again = load([c for c in command if c.startswith(("drafter.", "target.", "serve."))])
    assert again.drafter.dir == folder and again.target.max_num_seqs == 4
    assert again.serve.trace == str(tmp_path / "t.jsonl")


def test_servers_are_started_once_per_arm_and_round(config, tmp_path, monkeypatch):
    config.bench.arms, config.bench.loads = ["ar", "forespark"], [1]
    started = []

    def command(config, arm, *, trace=None, port=None):
        started.append(arm)
        return [sys.executable, str(MOCK), "--port", str(port)]

    config.serve.port = mock_server(tmp_path).port
    monkeypatch.setattr(decode, "serve_command", command)
    DecodeBenchmark(config, tmp_path / "out").run()
    assert started == ["ar", "ar", "forespark", "forespark", "ar"]  # answers, round 0, round 1
    rows = read_records(tmp_path / "out/records.jsonl")
    assert {(r.arm, r.round) for r in rows} == {
        ("ar", 0),
        ("ar", 1),
        ("forespark", 0),
        ("forespark", 1),
    }
    by_round = {r: {tuple(x.prompt_ids) for x in rows if x.round == r} for r in (0, 1)}
    assert all(len(prompts) == 1 for prompts in by_round.values())  # every arm: same prompts


def test_side_by_side_arms_take_turns_batch_by_batch(config, tmp_path, monkeypatch):
    config.bench.arms, config.bench.loads = ["ar", "dspark", "forespark"], [1, 2]
    config.bench.side_by_side = True
    config.serve.port = mock_server(tmp_path).port
    ports = {}

    def command(config, arm, *, trace=None, port=None):
        ports.setdefault(port, []).append(arm)
        mode = "die" if arm == "dspark" and len(ports) == 3 else "serve"
        return [sys.executable, str(MOCK), "--port", str(port), f"mock.mode={mode}"]

    monkeypatch.setattr(decode, "serve_command", command)
    first = config.serve.port
    with pytest.raises(ValueError, match="1 failures"):  # dspark, in the second round
        DecodeBenchmark(config, tmp_path / "out").run()
    assert ports == {
        first: ["ar", "ar", "dspark"],  # for its answers, round 0, round 1
        first + 1: ["dspark", "forespark"],
        first + 2: ["forespark", "ar"],
    }
    rows = read_records(tmp_path / "out/records.jsonl")
    order = [(row.round, row.load, row.arm) for row in rows]
    assert order == [
        (0, 1, "ar"), (0, 1, "dspark"), (0, 1, "forespark"),
        (0, 2, "dspark"), (0, 2, "forespark"), (0, 2, "ar"),
        (1, 1, "forespark"), (1, 1, "ar"), (1, 2, "ar"), (1, 2, "forespark"),
    ]  # fmt: skip


# --- step trace


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
