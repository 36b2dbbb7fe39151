"""Prompt forms, selection, and what a bad source says."""

from __future__ import annotations

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from forespark.bench.workloads import first_turn, load_prompts

USER = (("user", "hi there"),)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": " hi there "}, USER),
        ({"question": "hi there", "answer": "x"}, USER),
        ({"turns": ["hi there", "later"]}, USER),
        ({"messages": [{"role": "user", "content": "hi there"}]}, USER),
        (
            {"messages": [{"role": "system", "content": "be brief"},
                          {"role": "user", "content": "hi there"}]},
            (("system", "be brief"), *USER),
        ),
        ({"conversations": [{"from": "human", "value": "hi there"},
                            {"from": "gpt", "value": "x"}]}, USER),
        ({"conversations": [{"from": "gpt", "value": "x"},
                            {"from": "human", "value": "hi there"}]}, USER),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, None),
        ({"prompt": "   "}, None),
        ({"turns": []}, None),
        ({"messages": [{"role": "user", "content": None}]}, None),
        ({"class": "x", "data": ["y"]}, None),
        ([], None),
    ],
)  # fmt: skip
def test_forms(row, wanted):
    assert first_turn(row) == wanted


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return f"file:{path}"


def test_selection_is_deterministic_and_without_repetitions(tmp_path):
    rows = [{"prompt": f"p{i}"} for i in range(20)]
    one = write(tmp_path / "a.jsonl", rows + rows[:5])
    two = write(tmp_path / "b.jsonl.gz", rows[::-1])
    first = load_prompts([one], seed=3)
    assert len(first) == 20 and first == load_prompts([two, one], seed=3)
    assert first != load_prompts([one], seed=4)
    assert load_prompts([one], seed=3, limit=4) == first[:4]
    assert len(load_prompts([f"{one}#2:6"], seed=3)) == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("web:x", "unknown prompt source 'web:x'"),
        ("file:", "unknown prompt source"),
        ("hub:", "unknown prompt source"),
        ("hub:nope", "hub:nope: unknown name, want owner/dataset or one of aime25, gsm8k"),
        ("file:/nowhere.jsonl", "no such file"),
    ],
)
def test_bad_sources(source, message):
    with pytest.raises(ValueError, match=message):
        load_prompts([source], seed=0)


def test_bad_files_name_the_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n{"prom')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        load_prompts([f"file:{tmp_path}/x.jsonl"], seed=0)
    (tmp_path / "y.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="not readable"):
        load_prompts([f"file:{tmp_path}/y.jsonl.gz"], seed=0)
    with pytest.raises(ValueError, match="no usable prompt"):
        load_prompts([write(tmp_path / "z.jsonl", [{"text": "a"}])], seed=0)


def test_hub_source(monkeypatch):
    asked = []

    def load_dataset(path, config=None, **options):
        asked.append((path, config, options))
        turns = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "x"}]
        yield from ({"conversations": turns}, {"conversations": turns[1:]})

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (prompt,) = load_prompts(["hub:sharegpt#0:5"], seed=0)
    assert prompt.messages == USER
    assert load_prompts(["hub:someone/chats"], seed=0) == [prompt]
    options = {"data_files": None, "split": "train", "streaming": True}
    assert asked == [("Aeala/ShareGPT_Vicuna_unfiltered", None, options),
                     ("someone/chats", None, options)]  # fmt: skip


def test_hub_sets_have_their_field_and_instruction(monkeypatch):
    def load_dataset(path, config=None, *, data_files, split, streaming):
        if path == "json":
            assert [f.rpartition("/")[2] for f in data_files] == ["test5.jsonl", "test6.jsonl"]
            return [{"question_content": "add {two} numbers"}]
        assert (path, config, split) == ("openai/gsm8k", "main", "test")
        return [{"question": "How many {x}?", "answer": "4"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (math,) = load_prompts(["hub:gsm8k"], seed=0)
    assert math.messages[0][1].startswith("How many {x}?\n\nPlease reason step by step")
    assert math.messages[0][1].endswith("\\boxed{}.")
    (code,) = load_prompts(["hub:livecodebench"], seed=0)
    assert code.messages[0][1].endswith("\n\nadd {two} numbers")


def test_hub_that_cannot_be_reached(monkeypatch):
    def load_dataset(*path, **options):
        raise ConnectionError("offline\nmany lines")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"cannot read .* \(offline\); check the network"):
        load_prompts(["hub:sharegpt"], seed=0)
