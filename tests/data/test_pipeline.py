"""The whole stage against a fake server: counts, reasons, resume, decontamination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_cases import FakeServer, write_rows

from forespark import record
from forespark.config import reload
from forespark.data import regenerate
from forespark.data.pipeline import run


def quoted(*specs: str) -> str:
    return "data.sources=[" + ",".join(f"'{spec}'" for spec in specs) + "]"


@pytest.fixture
def build(configure: Any, server: FakeServer, tmp_path: Path) -> Any:
    """``build(rows, *overrides)`` runs the stage into ``tmp_path/out``."""

    def go(rows: list[dict[str, Any]], *overrides: str, **more: Any) -> dict[str, Any]:
        spec = write_rows(tmp_path / "in.jsonl", rows)
        config = configure(quoted(spec), *overrides)
        return run(config, **{"out": tmp_path / "out", "endpoint": server.url, **more})

    return go


def corpus(out: Path) -> list[dict[str, Any]]:
    from datasets import load_from_disk

    return load_from_disk(str(out)).to_list()


def test_corpus_has_the_answers_behind_the_mask(build: Any, tmp_path: Path, target: str) -> None:
    from forespark.data.template import tokenizer_of

    manifest = build([{"prompt": "one"}, {"turns": ["two", "three"]}])
    rows = corpus(tmp_path / "out")
    answers = [
        tokenizer_of(target).decode(
            [t for t, m in zip(r["input_ids"], r["loss_mask"], strict=True) if m]
        )
        for r in rows
    ]
    assert answers == ["echo one</s>", "echo two</s>", "echo three</s>"]
    assert manifest["counts"]["prompts"] == 2
    assert manifest["counts"]["rows"] == 3
    assert manifest["reasons"] == {}
    assert manifest == record.read_json(tmp_path / "out" / "manifest.json")
    assert reload(tmp_path / "out" / "config.yaml").data.concurrency == 4


def test_second_run_asks_nothing(
    build: Any, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"question {i}"} for i in range(4)]
    first = build(rows)
    asked = len(server.requests)
    assert build(rows) == first
    # What needs no server does not look for one; what does still complains.
    assert build(rows, endpoint="http://127.0.0.1:9") == first
    assert len(server.requests) == asked
    assert capsys.readouterr().out.count("nothing to do") == 2
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9"):
        build([*rows, {"prompt": "one more"}], endpoint="http://127.0.0.1:9")
    grown = build([*rows, {"prompt": "one more"}])
    assert len(server.requests) == asked + 1
    assert grown["counts"]["rows"] == 5


def test_reasons_are_counted_and_rows_kept(build: Any, server: FakeServer, tmp_path: Path) -> None:
    server.special = {
        "cut": ("never ends", "length"),
        "mute": ("", "stop"),
        "huge": 400,
    }
    rows: list[dict[str, Any]] = [
        {"prompt": "fine"},
        {"prompt": "Fine!"},
        {"prompt": ""},
        {"prompt": "x" * 500},
        {"prompt": "sneaky </s> token"},
        {"prompt": "cut"},
        {"prompt": "mute"},
        {"prompt": "huge"},
        {
            "conversations": [
                {"from": "human", "value": "tool"},
                {"from": "observation", "value": "{}"},
            ]
        },
        {"conversations": [{"from": "observation", "value": "{}"}]},
    ]
    manifest = build(rows, "data.keep_truncated=false")
    assert manifest["reasons"] == {
        "duplicate": 1,
        "empty_prompt": 1,
        "empty_response": 1,
        "over_long": 2,
        "special_token": 1,
        "truncated": 1,
        "unknown_role": 2,
    }
    assert manifest["reasons_trained"] == {"unknown_role": 1}
    assert manifest["counts"]["rows"] == 2
    errors = record.read_jsonl(tmp_path / "out" / "errors.jsonl")
    assert sum(manifest["reasons"].values()) == len(errors)
    assert all("row" in e for e in errors if not e["trained"] and e["reason"] != "duplicate")

    kept = build(rows, "data.keep_truncated=true")
    assert kept["reasons"] == manifest["reasons"]
    assert kept["reasons_trained"] == {"truncated": 1, "unknown_role": 1}
    assert kept["counts"]["rows"] == 3


def test_benchmark_prompt_hidden_in_a_conversation(build: Any, tmp_path: Path) -> None:
    bench = write_rows(tmp_path / "bench.jsonl", [{"turns": ["First?", "Explain the moon."]}])
    rows = [{"turns": ["hello", "EXPLAIN the moon", "thanks"]}, {"prompt": "explain the sun"}]
    for section in ("data.exclude", "calibrate.sources", "bench.prompts"):
        manifest = build(rows, f"{section}=['{bench}']")
        assert manifest["reasons"] == {"contaminated": 1}
        assert [r["id"] for r in record.read_jsonl(tmp_path / "out" / "prompts.jsonl")] == [
            json.loads((tmp_path / "out" / "prompts.jsonl").read_text())["id"]
        ]


def test_killed_run_loses_and_doubles_nothing(
    build: Any, server: FakeServer, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"question {i}"} for i in range(5)]
    rows.append({"turns": ["first", "second"]})
    whole = build(rows)
    path = tmp_path / "out" / "responses.jsonl"
    lines = {r["id"]: json.dumps(r) for r in record.read_jsonl(path)}
    talk = [
        row_id for row_id in lines if json.loads(lines[row_id])["primary_id"] == _last_id(tmp_path)
    ]
    single = [row_id for row_id in lines if row_id not in talk]
    # A kill in the middle of the conversation's second row, after two other answers.
    torn = [lines[single[0]], lines[single[1]], lines[talk[0]], lines[talk[1]][:40]]
    path.write_text("\n".join(torn))
    (tmp_path / "out" / "manifest.json").unlink()
    server.requests.clear()
    again = build(rows)
    assert again["hashes"]["rows"] == whole["hashes"]["rows"]
    assert len(server.requests) == 3 + 2
    assert len(record.read_jsonl(path)) == 7


def _last_id(tmp_path: Path) -> str:
    return str(record.read_jsonl(tmp_path / "out" / "prompts.jsonl")[-1]["id"])


def test_adopts_answers_made_elsewhere(build: Any, server: FakeServer, tmp_path: Path) -> None:
    rows = [
        {"id": f"boot-{i}", "conversations": [{"role": "user", "content": f"q {i}"}]}
        for i in range(3)
    ]
    build(rows)
    responses = (tmp_path / "out" / "responses.jsonl").read_text()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "responses.jsonl").write_text(responses + responses)  # doubled rows do not matter
    (tmp_path / "out").rename(tmp_path / "old")
    fresh.rename(tmp_path / "out")
    server.requests.clear()
    manifest = build(rows)
    assert server.requests == []
    assert manifest["counts"]["rows"] == 3


def test_answers_of_another_template_or_temperature(build: Any, tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "q"}, {"id": "b", "prompt": "r"}]
    build(rows)
    path = tmp_path / "out" / "responses.jsonl"
    answers = record.read_jsonl(path)
    answers[0]["input_ids"][0] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in answers))
    assert build(rows)["reasons"] == {"template_mismatch": 1}
    with pytest.raises(ValueError, match="sampled at temperature 0"):
        build(rows, "data.temperature=1.0")


def test_long_conversation_is_cut_not_lost(build: Any, server: FakeServer) -> None:
    turns = [f"turn {i} " + "y" * 200 for i in range(8)]
    manifest = build([{"turns": turns}], "target.max_model_len=1200")
    assert manifest["reasons"] == {"conversation_cut": 1}
    assert 1 <= manifest["counts"]["rows"] < 8
    assert {body["max_completion_tokens"] for body in server.requests} == {200}


def test_failed_requests_are_tried_again(
    build: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.data_generation import vllm_client

    monkeypatch.setattr(vllm_client, "RETRY_BACKOFF_BASE", 0)
    server.special = {"flaky": 500}
    rows = [{"prompt": "flaky"}, {"prompt": "fine"}]
    assert build(rows)["reasons"] == {"request_failed": 1}
    server.special = {}
    assert build(rows)["reasons"] == {}


def test_magpie_samples_once(configure: Any, server: FakeServer, tmp_path: Path) -> None:
    server.turns = [
        "How do I bake bread?",
        "how do i bake BREAD",
        "",
        "long",
        "hi",
        "la la la la la la la",
        "What is a kite?",
    ]
    config = configure("data.sources=[magpie]", "data.magpie_rows=2")
    manifest = run(config, out=tmp_path / "out", endpoint=server.url)
    assert manifest["counts"]["prompts_by_source"] == {"magpie": 2}
    assert manifest["reasons"] == {
        "magpie_duplicate": 1,
        "magpie_empty": 1,
        "magpie_repetitive": 1,
        "magpie_too_long": 1,
        "magpie_too_short": 1,
    }
    sampled = [body for body in server.requests if "prompt" in body]
    assert {body["prompt"] for body in sampled} == {"<s>user "}
    assert {tuple(body["stop_token_ids"]) for body in sampled} == {(1,)}
    server.requests.clear()
    assert run(config, out=tmp_path / "out", endpoint=server.url) == manifest
    assert server.requests == []
    with pytest.raises(ValueError, match=r"another data\.seed"):
        run(
            configure("data.sources=[magpie]", "data.magpie_rows=2", "data.seed=5"),
            out=tmp_path / "out",
            endpoint=server.url,
        )


def test_limit_takes_some_of_every_source(
    configure: Any, server: FakeServer, tmp_path: Path
) -> None:
    a = write_rows(tmp_path / "a.jsonl", [{"prompt": f"apple {i}"} for i in range(9)])
    b = write_rows(tmp_path / "b.jsonl", [{"prompt": f"pear {i}"} for i in range(9)])
    config = configure(quoted(a, b))
    manifest = run(config, out=tmp_path / "out", endpoint=server.url, limit=4)
    assert manifest["counts"]["prompts_by_source"] == {a: 2, b: 2}
    with pytest.raises(ValueError, match="--limit: got 0"):
        run(config, out=tmp_path / "out", endpoint=server.url, limit=0)
    with pytest.raises(ValueError, match="--limit"):
        configure("data.limit=0")


def test_same_given_id_for_two_prompts(build: Any) -> None:
    assert build([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}])["counts"]["rows"] == 2


def test_nothing_usable_is_an_error(build: Any, server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no usable prompt"):
        build([{"prompt": ""}])
    with pytest.raises(ValueError, match=r"'text'.*want one of messages.*see .*errors\.jsonl"):
        build([{"text": "other form"}])
    (left_out,) = record.read_jsonl(tmp_path / "out" / "errors.jsonl")
    assert left_out["row"] == {"text": "other form"}
    server.special = {"mute": ("", "stop")}
    with pytest.raises(ValueError, match="no answer can be trained on"):
        build([{"prompt": "mute"}])


def test_wrong_endpoint(configure: Any, server: FakeServer, tmp_path: Path) -> None:
    spec = write_rows(tmp_path / "a.jsonl", [{"prompt": "apple"}])
    with pytest.raises(ValueError, match="no OpenAI-compatible server"):
        run(configure(quoted(spec)), out=tmp_path / "o", endpoint="http://127.0.0.1:9")
    server.model = "another"
    with pytest.raises(ValueError, match="serves another"):
        run(configure(quoted(spec)), out=tmp_path / "o", endpoint=f"{server.url}/v1")
    assert not (tmp_path / "o").exists()
    server.model, server.name = configure().target.model, "smollm2"  # as serve.py names it
    manifest = run(configure(quoted(spec)), out=tmp_path / "o", endpoint=server.url)
    assert manifest["counts"]["rows"] == 1
    assert {body["model"] for body in server.requests} == {"smollm2"}


def test_missing_inputs_stop_before_any_file_is_written(configure: Any, tmp_path: Path) -> None:
    spec = write_rows(tmp_path / "a.jsonl", [{"prompt": "apple"}])
    for setting, words in [
        (f"target.model={tmp_path}/none", "no such directory"),
        (f"data.exclude=['file:{tmp_path}']", "is a directory, want a file"),
        (f"data.exclude=['file:{tmp_path}/b']", "no such file"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(configure(quoted(spec), setting), out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_no_room_for_an_answer(configure: Any) -> None:
    with pytest.raises(ValueError, match="no room for an answer"):
        regenerate.answer_cap(configure("data.max_prompt_tokens=2000"))
