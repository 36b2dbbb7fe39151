"""The acceptance benchmark on a mock engine: counting, closed loop, resume, refusals."""

from __future__ import annotations

import json

import pytest
from mock_server import MockEngine, running

from forespark.bench import acceptance
from forespark.bench.acceptance import AcceptanceBenchmark
from forespark.bench.workloads import load_prompts
from forespark.config import load
from forespark.record import append_jsonl, read_jsonl


def prompts(path, *contents, **fields):
    for number, content in enumerate(contents):
        append_jsonl(path, {"prompt": content + " " * number} | fields)
    return f"file:{path}"


def config(tmp_path, sets, *overrides):
    listed = ",".join(f"'{name}={source}'" for name, source in sets.items())
    return load([
        "target=smollm2", f"bench.sets=[{listed}]", "bench.arms=[ar,dflash2,forespark]",
        "bench.acceptance_load=2", f"run_dir='{tmp_path / 'run'}'", *overrides,
    ])  # fmt: skip


def script(**fields):
    return json.dumps({"chunks": [[0, 7], [0.01, 7]], **fields})


def test_length_is_what_a_verified_block_yields(tmp_path):
    first = prompts(tmp_path / "a.jsonl", *(script(first=0.001 * i) for i in range(5)))
    second = prompts(tmp_path / "b.jsonl", script(first=0.02))
    made = config(tmp_path, {"a": first, "b": second})
    engine = MockEngine()
    with running(engine) as url:
        out = AcceptanceBenchmark(made, tmp_path / "out", url).run()
        asked = len(engine.requests)
        rows = read_jsonl(out / "records.jsonl")
        assert [(r["drafter"], r["set"], r["requests"]) for r in rows] == [
            ("forespark", "a", 5), ("forespark", "b", 1),
        ]  # fmt: skip
        # 14 tokens a request in two blocks, six accepted of each.
        assert [(r["tokens"], r["blocks"], r["accepted"]) for r in rows] == [
            (70, 10, 60), (14, 2, 12),
        ]  # fmt: skip
        AcceptanceBenchmark(made, tmp_path / "out", url).run()
        assert asked == len(engine.requests) == 6
    assert not any("vllm_xargs" in request for request in engine.requests)


def test_a_failed_set_is_named_and_measured_again(tmp_path):
    bad = prompts(tmp_path / "a.jsonl", script(), script(fail="http"))
    made = config(tmp_path, {"bad": bad, "good": prompts(tmp_path / "b.jsonl", script(first=0.03))})
    with running(MockEngine()) as url, pytest.raises(ValueError, match="1 sets failed"):
        AcceptanceBenchmark(made, tmp_path / "out", url).run()
    assert [r["set"] for r in read_jsonl(tmp_path / "out/records.jsonl")] == ["good"]
    (error,) = read_jsonl(tmp_path / "out/errors.jsonl")
    assert error["set"] == "bad" and "HTTP 400" in error["error"]


@pytest.mark.parametrize(
    ("chunks", "export", "message"),
    [([[0, 7], [0, 5]], True, "12 drafts were verified, which is not whole blocks of 7"),
     ([[0, 7]], False, "no forespark: counters"), ([], True, "0 drafts were verified")],
)  # fmt: skip
def test_what_is_no_measurement_of_whole_blocks(tmp_path, chunks, export, message):
    made = config(tmp_path, {"a": prompts(tmp_path / "a.jsonl", script(chunks=chunks))})
    engine = MockEngine()
    engine.export = export
    with running(engine) as url, pytest.raises(ValueError, match="1 sets failed"):
        AcceptanceBenchmark(made, tmp_path / "out", url).run()
    assert message in read_jsonl(tmp_path / "out/errors.jsonl")[0]["error"]


def test_refusals(tmp_path):
    source = prompts(tmp_path / "a.jsonl", script())
    out = tmp_path / "out"
    for sets in ("[]", "['gsm8k']", "['=starter:bench']"):
        with pytest.raises(ValueError, match=r"bench\.sets: got .* want one or more NAME=SOURCE"):
            load(["target=smollm2", f"bench.sets={sets}"])
    with pytest.raises(ValueError, match="want an arm that drafts"):
        AcceptanceBenchmark(config(tmp_path, {"a": source}, "bench.arms=[ar]"), out)
    both = config(tmp_path, {"a": source}, "bench.arms=[dspark,forespark]")
    with pytest.raises(ValueError, match="--endpoint serves one drafter"):
        AcceptanceBenchmark(both, out, "http://127.0.0.1:9")
    absent = config(tmp_path, {"a": source}, f"drafter.dir={tmp_path}/none")
    with pytest.raises(ValueError, match=r"no drafter forespark: run `python train\.py"):
        AcceptanceBenchmark(absent, out)
    with running(MockEngine()) as url:
        AcceptanceBenchmark(config(tmp_path, {"a": source}), out, url).run()
        other = config(tmp_path, {"a": source}, "bench.output_tokens=9")
        with pytest.raises(ValueError, match="measured with other settings: output_tokens"):
            AcceptanceBenchmark(other, out, url).run()


def test_drafters_serve_whole_blocks(tmp_path):
    """What SERVED starts drafts and verifies everything."""
    for drafter, (arm, overrides) in acceptance.SERVED.items():
        served = load(["target=smollm2", f"arm={arm}", *overrides]).arm
        assert (served.drafter, served.draft, served.verify) == (drafter, "full", "full")


def test_rows_of_one_category(tmp_path):
    path = tmp_path / "spec.jsonl"
    prompts(path, "a", "b", category="math_reasoning")
    prompts(path, "c", category="qa")
    found = load_prompts([f"file:{path}@math_reasoning"], seed=0)
    assert sorted(p.messages[0][1] for p in found) == ["a", "b"]
    assert len(load_prompts([f"file:{path}@math_reasoning#1:3"], seed=0)) == 1
    assert len(load_prompts([f"file:{path}"], seed=0)) == 3
    with pytest.raises(ValueError, match="no usable prompt"):
        load_prompts([f"file:{path}@rag"], seed=0)
