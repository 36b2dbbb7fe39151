"""Corpus reading, the split, packing."""

from __future__ import annotations

import json

import pytest

from forespark.training import rows
from tests.training.conftest import write_corpus


def test_growing_files_join_and_torn_lines_wait(tmp_path, corpus):
    sources = [corpus, tmp_path / "more[0-9]*.jsonl"]
    before = rows.read_rows(sources)
    write_corpus(tmp_path / "more2.jsonl", 5, first=100)
    with (tmp_path / "more2.jsonl").open("a") as out:
        out.write('{"id": "torn", "inp')
    after = rows.read_rows(sources)
    assert [r.id for r in after[: len(before)]] == [r.id for r in before]
    assert len(after) == len(before) + 5


def test_rows_without_labels_and_repeats_are_left_out(tmp_path):
    path = tmp_path / "c.jsonl"
    row = {"id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]}
    lines = [row, row, {"id": "b", "input_ids": [1, 2], "loss_mask": [0, 0]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [r.id for r in rows.read_rows([path])] == ["a"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"id": "a"}\n', "needs id, input_ids and loss_mask"),
        ('{"id": "a", "input_ids": [1], "loss_mask": []}\n', "1 input_ids but 0"),
        ("{\n", "line 1: not JSON"),
        ("", "no row with a labelled token"),
    ],
)
def test_bad_corpora_are_named(tmp_path, text, what):
    path = tmp_path / "c.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=what):
        rows.read_rows([path])
    with pytest.raises(ValueError, match="no such corpus"):
        rows.read_rows([tmp_path / "absent.jsonl"])


def test_split_keeps_prompts_together_and_sides_stable(tmp_path, corpus):
    found = rows.read_rows([corpus])
    train, held = rows.split_rows(found, 0.3)
    assert {r.id for r in train} | {r.id for r in held} == {r.id for r in found}
    assert not {r.group for r in train} & {r.group for r in held}
    write_corpus(corpus, 20, seed=1, first=50)
    train2, held2 = rows.split_rows(rows.read_rows([corpus]), 0.3)
    assert {r.id for r in train} <= {r.id for r in train2}
    assert {r.id for r in held} <= {r.id for r in held2}


def test_packs_hold_every_row_once_within_the_budget():
    lengths = {"a": 5, "b": 4, "c": 20, "d": 1}
    packs = rows.pack(list("abcd"), lengths, 10)
    assert packs == [["a", "b"], ["c"], ["d"]]


def test_frequent_answer_tokens():
    row = rows.CorpusRow("a", "a", (7, 7, 7, 5, 5, 3, 9), (0, 0, 0, 1, 1, 1, 1))
    assert rows.frequent_tokens([row], 2).tolist() == [3, 5]


def _answer(prompt: list[int], *answers: list[int]) -> rows.CorpusRow:
    ids, mask = list(prompt), [0] * len(prompt)
    for answer in answers:
        ids, mask = [*ids, *answer, 1], [*mask, *([1] * len(answer)), 0]
    return rows.CorpusRow("a", "a", tuple(ids), tuple(mask))


def test_a_looping_answer_ends_soon_after_its_loop_begins():
    start, loop = list(range(10, 30)), list(range(100, 112))
    row = _answer([5] * 40, [*start, *loop * 6])  # the prompt's own repetition does not count
    cut = rows.cut_loops(row, most=4)
    # The loop's second round repeats 8 tokens for the first time at its eighth token.
    assert len(cut.input_ids) == 40 + 20 + 12 + 7 + 4
    assert cut.input_ids == row.input_ids[: len(cut.input_ids)] and len(cut.loss_mask) == 83
    assert rows.cut_loops(row, most=100) == row


def test_answers_that_share_text_are_not_loops():
    same = list(range(10, 40))
    row = _answer([1, 2], same, same)
    assert rows.cut_loops(row, most=0) == row


def test_corpora_are_read_cut(tmp_path):
    loop = list(range(100, 112)) * 6
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"id": "a", "input_ids": loop, "loss_mask": [1] * 72}) + "\n")
    assert len(rows.read_rows([path])[0].input_ids) == 72
    assert len(rows.read_rows([path], most_repeated=2)[0].input_ids) == 12 + 7 + 2
