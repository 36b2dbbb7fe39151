"""Training cost: what is timed, what is counted, and the table made from it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from forespark.models.base import LossRows
from forespark.models.blocks import select_anchors
from forespark.record import read_json, read_jsonl
from forespark.training.build import drafter_of, state_cache
from forespark.training.cost import ARMS, Learner, count_parameters, measure
from forespark.training.rows import read_rows
from forespark.training.run import corpus_sources

ROOT = Path(__file__).resolve().parents[2]


def test_plain_dflash2_is_the_joint_loss_without_estimators(config):
    model = drafter_of(config, "forespark")
    row = state_cache(config).row(read_rows(corpus_sources(config))[:3], 48)
    anchors = select_anchors(row, None)
    plain, metrics = model.backbone_loss(row, anchors, LossRows())
    model.options.lambda_pre = model.options.lambda_post = 0.0
    joint, _ = model(row, anchors, 2, LossRows())
    assert torch.equal(plain, joint) and not any(name.startswith("p") for name in metrics)
    plain.backward()
    assert all(p.grad is None for p in [*model.pre.parameters(), *model.post.parameters()])


def test_estimators_are_counted_apart(config):
    learner = Learner(config, "forespark")
    sizes = count_parameters(learner.model)
    # W_c, W_e: 4 x 32, bias 4; W_o: 10 x 4 and 10; w: 32 + 4, bias 1
    assert sizes["estimators"] == 2 * 4 * 32 + 4 + 10 * 4 + 10 + 37
    trained = sum(p.numel() for p in learner.parameters)
    assert sizes["drafter"] + sizes["estimators"] == trained
    assert sum(p.numel() for p in Learner(config, "dflash2").parameters) == sizes["drafter"]


def test_records_and_table(config, tmp_path, monkeypatch):
    config.train.max_steps = 4
    path = measure(config, tmp_path / "cost")
    records = read_jsonl(path)
    assert len(records) == 4 * len(ARMS) and {r["arm"] for r in records} == set(ARMS)
    assert [r["length"] for r in records[:: len(ARMS)]] == [4, 1, 2, 3]
    firsts = [r["arm"] for r in records[:: len(ARMS)]]
    assert set(firsts) == set(ARMS), "the order rotates"
    assert read_json(tmp_path / "cost" / "run.json")["parameters"]["dflash2"]["estimators"] == 0
    with pytest.raises(ValueError, match="is there already"):
        measure(config, tmp_path / "cost")

    monkeypatch.syspath_prepend(str(ROOT / "plot"))
    plot = importlib.import_module("training_cost")
    frame, run = plot.read(tmp_path / "cost")
    frame["seconds"] = [2.0 if arm == "forespark" else 1.0 for arm in frame["arm"]]
    table = plot.render(plot.summarize(frame, run))
    assert "| ForeSpark | 4 | 2.00 s (2.00 s) | 2.000 (2.000) |" in table
    folder = str(tmp_path / "figures")
    monkeypatch.setattr(sys, "argv", ["x", "--records", str(path.parent), "--out", folder])
    plot.main()
    assert (tmp_path / "figures" / "training_cost.png").exists()
