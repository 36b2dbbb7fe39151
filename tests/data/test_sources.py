"""Every source form, odd rows on purpose, and what a bad source says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from data_cases import write_rows

from forespark.data.prompts import Drops, Forbidden, Prompt, content_id, normalize, parse_row
from forespark.data.sources import (
    STARTER_PARTS,
    SourceContext,
    check_files,
    iterate,
    load_prompts,
    split_spec,
)


def turns(row: dict[str, Any]) -> list[str]:
    return [text for _, text in parse_row(row).messages]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "x"},
                    {"from": "human", "value": "b"},
                ]
            },
            ["a", "b"],
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, ["a"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, ["a"]),
        ({"prompt": " a "}, ["a"]),
        ({"prompt": [{"role": "user", "content": "a"}]}, ["a"]),
        ({"question_id": 1, "category": "w", "turns": ["a", "b"]}, ["a", "b"]),
        ({"question": "a", "answer": "x"}, ["a"]),
        ({"instruction": "a", "input": "b", "output": "x"}, ["a\n\nb"]),
        ({"class": " Vicuna ", "data": "a"}, ["a"]),
        ({"data": ["a", "x", "b", "y"]}, ["a", "b"]),
    ],
)
def test_every_form_gives_its_user_turns(row: dict[str, Any], expected: list[str]) -> None:
    parsed = parse_row(row)
    assert [text for _, text in parsed.messages] == expected
    assert parsed.reason is None


def test_system_message_is_kept() -> None:
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}
    assert parse_row(row).messages == (("system", "s"), ("user", "a"))


@pytest.mark.parametrize("role", ["function_call", "observation", "tool"])
def test_unknown_role_ends_the_conversation(role: str) -> None:
    human, odd = {"from": "human", "value": "a"}, {"from": role, "value": "{}"}
    parsed = parse_row({"conversations": [human, odd, {"from": "human", "value": "b"}]})
    assert parsed.messages == (("user", "a"),)
    assert (parsed.reason, parsed.detail) == ("unknown_role", role)
    assert parse_row({"conversations": [odd, human]}).messages == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "  "}, "empty_prompt"),
        ({"prompt": None}, "empty_prompt"),
        ({"turns": []}, "empty_prompt"),
        ({"answer": "x"}, "unreadable"),
        ({"messages": ["a"]}, "unreadable"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "unsupported_content"),
        (
            {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "a"}]},
            "assistant_first",
        ),
        ({"messages": [{"role": "system", "content": "only this"}]}, "empty_prompt"),
    ],
)
def test_unusable_rows_have_a_reason(row: dict[str, Any], reason: str) -> None:
    parsed = parse_row(row)
    assert parsed.messages == ()
    assert parsed.reason == reason


def test_normalize_folds_case_and_punctuation_but_not_arithmetic() -> None:
    assert normalize("  What’s  UP? ") == normalize("what s up")
    assert normalize("3 + 4") != normalize("3 - 4")
    assert normalize("???") == "???"


def test_ids_are_content_hashes() -> None:
    assert content_id("x", [("user", "a")]) == content_id("x", [("user", "a")])
    assert content_id("x", [("user", "a")]) != content_id("x", [("user", "a"), ("user", "b")])


def test_forbidden_matches_any_turn() -> None:
    forbidden = Forbidden()
    forbidden.add(Prompt("b", "bench", (("user", "Name three rivers."),)))
    hidden = Prompt(
        "t", "train", (("user", "Hello"), ("user", "name three rivers"), ("user", "Thanks"))
    )
    assert forbidden.match(hidden) == "bench"
    assert forbidden.match(Prompt("t", "train", (("user", "Name four rivers."),))) is None


def test_gz_slice_and_given_id(tmp_path: Path, configure: Any) -> None:
    path = tmp_path / "q.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(
            json.dumps({"id": f"r{i}", "question": f"question {i}"}) + "\n" for i in range(5)
        )
    found = load_prompts([f"file:{path}#1:3"], configure())
    assert [prompt.id for prompt in found] == ["r1", "r2"]
    assert len(load_prompts([f"file:{path}"], configure(), limit=4)) == 4
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"q\.jsonl\.gz: cannot be read"):
        load_prompts([f"file:{path}"], configure())


def test_bad_line_names_file_and_line(tmp_path: Path, configure: Any) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"prom\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not JSON"):
        load_prompts([f"file:{path}"], configure())
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="want a JSON object"):
        load_prompts([f"file:{path}"], configure())


@pytest.mark.parametrize("spec", ["hug:x", "file:", "hub:", "starter:test", ""])
def test_unknown_sources_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"source|starter part"):
        split_spec(spec)


def test_missing_file_and_magpie_without_server(tmp_path: Path, configure: Any) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_prompts([f"file:{tmp_path}/none.jsonl"], configure())
    with pytest.raises(ValueError, match="magpie_rows is 0"):
        load_prompts(["magpie"], configure())
    with pytest.raises(ValueError, match="served target"):
        load_prompts(["magpie"], configure("data.magpie_rows=2"))


def test_dry_run_reads_the_files(tmp_path: Path, configure: Any) -> None:
    path = tmp_path / "a.jsonl"
    config = configure(f"data.sources=['file:{path}']")
    for text, words in [
        ("", "the file is empty; give JSON lines"),
        ('{"prompt": "a"}\n[1]\n', "line 2: want a JSON object"),
        ('{"text": "a"}\n', r"no usable prompt .*'unreadable': 1.*want one of messages"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            check_files(config)
    path.write_text('{"text": "a"}\n{"prompt": "a"}\n')
    check_files(config)
    with pytest.raises(ValueError, match="is a directory, want a file"):
        check_files(configure(f"data.sources=['file:{tmp_path}']"))


def test_hub_offline_is_one_clear_line(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline mode is enabled\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name in ("alpaca", "ultrachat", "owner/set"):
        with pytest.raises(ValueError, match=r"cannot load .*offline mode.*file:PATH") as caught:
            load_prompts([f"hub:{name}"], configure())
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown preset"):
        load_prompts(["hub:nosuch"], configure())


def test_hub_rows_go_through_the_preset(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    found = load_prompts(["hub:ultrachat"], configure())
    assert [prompt.user_turns for prompt in found] == [["a"]]


def test_starter_parts_are_large_and_disjoint(configure: Any) -> None:
    parts = {part: load_prompts([f"starter:{part}"], configure()) for part in STARTER_PARTS}
    assert {part: len(rows) for part, rows in parts.items()} == {
        "train": 392,
        "calibration": 115,
        "bench": 126,
        "conversations": 48,
        "questions": 120,
    }
    held_out = Forbidden()
    for part in set(STARTER_PARTS) - {"train"}:
        for prompt in parts[part]:
            held_out.add(prompt)
    assert not [prompt for prompt in parts["train"] if held_out.match(prompt)]
    for part, rows in parts.items():
        several = sum(len(prompt.user_turns) > 1 for prompt in rows)
        assert several >= (0 if part == "questions" else 20)
        assert all(prompt.id == content_id("starter", prompt.messages) for prompt in rows)


def test_dropped_rows_are_kept_whole(tmp_path: Path, configure: Any) -> None:
    spec = write_rows(tmp_path / "x.jsonl", [{"answer": "x"}, {"prompt": "ok"}])
    context = SourceContext(configure(), Drops())
    assert [prompt.user_turns for prompt in iterate(spec, context)] == [["ok"]]
    assert context.drops.rows[0]["row"] == {"answer": "x"}
    assert context.drops.counts() == {"unreadable": 1}
