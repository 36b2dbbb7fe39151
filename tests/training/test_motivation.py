"""The walk of full-block drafting over held-out answers, and what is drawn from it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from forespark.record import append_jsonl, read_json, read_jsonl
from forespark.training import motivation
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import Trainer
from forespark.training.replay import load_exported, replay
from forespark.training.rows import CorpusRow
from forespark.training.run import corpus_sources
from forespark.training.states import LocalStates

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def drafter(config, tmp_path):
    made = Trainer(
        config, drafter_of(config, "forespark"), state_cache(config), name="forespark",
        sources=corpus_sources(config), folder=tmp_path / "train", out=tmp_path / "drafter",
    )  # fmt: skip
    config.drafter.dir = str(made.fit(lambda *_: None))
    return Path(config.drafter.dir)


def test_answers_of_a_row():
    row = CorpusRow("a", "a", tuple(range(8)), (0, 1, 1, 0, 0, 1, 1, 1))
    assert motivation.answers(row) == [(1, 3), (5, 8)]


def test_the_walk_goes_on_where_a_draft_failed(config, drafter):
    model = load_exported(config, "forespark", drafter)
    source = LocalStates(config.target.model, config.target.target_layer_ids)
    # An answer that the drafter writes itself in part, so that something is accepted.
    ids = [5, 9, 3, 7]
    for _ in range(5):
        ids += [*replay(model, source, [*ids, 0], [len(ids) - 1], 4)[0].drafts[:2], 11]
    found = motivation.walk(model, source, ids, 2, len(ids))
    assert found is not None and sum(found["accepted"]) > 0
    at, anchors = 2, []
    for accepted in found["accepted"]:
        anchors.append(at)
        at += accepted + 1
    assert at >= len(ids) - 4 > anchors[-1]
    for index, anchor in enumerate(anchors):
        full = replay(model, source, ids, [anchor])[0]
        assert full.accepted == found["accepted"][index]
        for d in (1, 2, 3):
            short = replay(model, source, ids, [anchor], d)[0].drafts
            assert found["differs"][index][d - 1] == (short != full.drafts[:d])
    assert motivation.walk(model, source, ids[:7], 2, 7) is None


def test_records_figure_and_refusals(config, drafter, tmp_path, monkeypatch):
    corpus = Path(config.train.data[0])
    for i in range(6):
        row = {"id": f"long{i}", "input_ids": [5, *range(3, 23)], "loss_mask": [0] + [1] * 20}
        append_jsonl(corpus, row)
    config.train.validation_fraction = 0.5
    records = motivation.measure(config, tmp_path / "out")
    rows = read_jsonl(records)
    run = read_json(tmp_path / "out" / "run.json")
    assert rows and run["K"] == 4 and run["answers"] == len(rows)
    assert all(len(entry) == 3 for row in rows for entry in row["differs"])
    with pytest.raises(ValueError, match="is there already"):
        motivation.measure(config, tmp_path / "out")
    monkeypatch.syspath_prepend(str(ROOT / "plot"))
    plot = importlib.import_module("motivation")
    made = [
        {"bench": "motivation", "accepted": [0, 3, 3], "differs": [[0, 1], [0, 0], [0, 0]]},
        {"bench": "motivation", "accepted": [1, 0], "differs": [[0, 1], [1, 1]]},
    ]
    assert plot.changes(made).tolist() == [3, 0, 1]
    frame = plot.table(made)
    shares = {(r.kind, r.value): r.share for r in frame.itertuples()}
    assert shares["change", 3] == pytest.approx(1 / 3) and shares["change", 2] == 0
    assert shares["differs", 1] == pytest.approx(0.2) and shares["differs", 2] == 0.6
    text = plot.render(made)
    assert "in 67 % of cases, by three tokens or more in 33 %" in text and "20 to 60 %" in text
    plot.draw(frame, "tiny")
    plot.draw(plot.table([]), "tiny")
    assert len(plot.read(tmp_path / "out")) == len(rows)
    append_jsonl(records, {"schema": 1, "bench": "motivation", "accepted": [1], "differs": []})
    with pytest.raises(ValueError, match="one list per accepted count"):
        plot.read(tmp_path / "out")
    sys.modules.pop("motivation")
