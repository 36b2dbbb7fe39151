"""drafter.init=FOLDER: training goes on from an exported drafter."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from forespark.config import load
from forespark.record import read_json, read_jsonl
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import Trainer
from forespark.training.run import corpus_sources
from tests.training.conftest import tiny_overrides


def silent(split, values, step):
    return None


def trainer(config, folder, name):
    return Trainer(
        config, drafter_of(config, name), state_cache(config), name=name,
        sources=corpus_sources(config), folder=folder / "train", out=folder / "out",
    )  # fmt: skip


def started_from(config, folder):
    return dataclasses.replace(
        config, drafter=dataclasses.replace(config.drafter, init=str(folder))
    )


@pytest.mark.parametrize("name", ["forespark", "dspark"])
def test_training_goes_on_from_an_exported_drafter(config, tmp_path, name):
    first = trainer(config, tmp_path / "first", name)
    # Estimators start at zero: as they come out they must differ from a fresh model's.
    out = first.fit(silent)
    before = first.validate()
    second = trainer(started_from(config, out), tmp_path / "second", name)
    second._start_epoch()
    second._set_scale()
    second.model.options = first.model.options  # cross-entropy warms up alone at first
    after = second.validate()
    assert before.keys() == after.keys()
    for key, value in before.items():
        # The export rounds weights to bfloat16, 2^-8 of each.
        assert after[key] == pytest.approx(value, rel=0.03, abs=0.03), key
    scale = second.model.core.fc.input_scale
    assert not torch.allclose(scale, torch.ones_like(scale), atol=0.1)
    if name == "forespark":
        for trained, taken in zip(
            first.model.pre.parameters(), second.model.pre.parameters(), strict=True
        ):
            torch.testing.assert_close(taken, trained)
        assert second.model.pre.w_o.weight.abs().sum() > 0
    second.fit(silent)
    curve = read_jsonl(second.folder / "metrics.jsonl")
    assert [row["step"] for row in curve if row["split"] == "validation"] == [0, 8]
    assert read_json(second.out / "training.json")["step"] == 8


def test_a_bare_checkpoint_starts_with_fresh_estimators(config, tmp_path):
    out = trainer(config, tmp_path / "first", "forespark").fit(silent)
    shutil.rmtree(out / "forespark")
    model = drafter_of(started_from(config, out), "forespark")
    assert float(model.pre.w_o.weight.abs().sum()) == 0.0


def test_what_cannot_be_started_from_is_refused(config, tmp_path, tiny_target, corpus):
    with pytest.raises(ValueError, match=r"drafter\.init: got .*absent"):
        load([*tiny_overrides(tiny_target, corpus, tmp_path), "drafter.init=absent"])
    out = trainer(config, tmp_path / "first", "forespark").fit(silent)
    other = started_from(config, out)
    with pytest.raises(ValueError, match="not such a drafter"):
        drafter_of(other, "dspark")
    wider = dataclasses.replace(other.drafter, estimator_rank=5)
    with pytest.raises(ValueError, match="estimators of shapes"):
        drafter_of(dataclasses.replace(other, drafter=wider), "forespark")
    deeper = dataclasses.replace(other.drafter, num_layers=3)
    with pytest.raises(ValueError, match="not such a drafter"):
        drafter_of(dataclasses.replace(other, drafter=deeper), "forespark")
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ValueError, match="damaged"):
        drafter_of(other, "forespark")
