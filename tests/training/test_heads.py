"""heads.py: estimators fitted on a frozen checkpoint; resume, places, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from forespark.models.base import LossRows
from forespark.models.blocks import select_anchors
from forespark.models.estimators import load_heads
from forespark.record import file_sha256, read_json, read_jsonl, write_json
from forespark.training import heads
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import Trainer
from forespark.training.run import corpus_sources


@pytest.fixture(scope="module")
def checkpoint(tiny_target, tmp_path_factory):
    """A DFlash 2 checkpoint trained for two steps, with its own estimators beside it."""
    from forespark.config import load
    from tests.training.conftest import tiny_overrides, write_corpus

    folder = tmp_path_factory.mktemp("checkpoint")
    corpus = write_corpus(folder / "corpus.jsonl", 24)
    config = load([*tiny_overrides(tiny_target, corpus, folder), "train.max_steps=2"])
    made = Trainer(
        config, drafter_of(config, "forespark"), state_cache(config), name="forespark",
        sources=corpus_sources(config), folder=folder / "train", out=folder / "drafter",
    )  # fmt: skip
    return made.fit(lambda split, values, step: None)


@pytest.fixture
def bare(checkpoint, config, tmp_path):
    """The checkpoint without estimators, as others publish it, and a configuration for it."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, folder / name)
    config.drafter.dir = str(folder)
    return folder


def losses(folder):
    return [r["loss"] for r in read_jsonl(folder / "metrics.jsonl") if r["split"] == "train"]


def test_only_the_estimators_change(bare, config):
    before = file_sha256(bare / "model.safetensors")
    assert heads.run(config) == bare
    assert file_sha256(bare / "model.safetensors") == before
    pre, _, meta = load_heads(
        bare / "forespark", drafter=bare / "model.safetensors", num_speculative_tokens=4
    )
    assert meta.form == "triangle" and meta.target == "tiny" and meta.rank == 4
    assert meta.provenance["heads_only"] and meta.provenance["step"] == 8
    assert pre.w_o.weight.detach().abs().sum() > 0
    # Fitted in place once, the same command may go on; joint estimators are not overwritten.
    assert heads.run(config) == bare


def test_same_losses_as_joint_training(bare, config):
    frozen = heads.load_frozen(config, bare)
    joint = drafter_of(config, "forespark")
    joint.core = frozen.core
    with torch.no_grad():
        for parameter in [*frozen.pre.parameters(), *frozen.post.parameters()]:
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    joint.pre, joint.post = frozen.pre, frozen.post
    sources = state_cache(config)
    from forespark.training.rows import read_rows

    row = sources.row(read_rows(corpus_sources(config))[:3], 48)
    anchors = select_anchors(row, None)
    for length in (4, 2):
        loss, ours = frozen(row, anchors, length, LossRows())
        _, theirs = joint(row, anchors, length, LossRows())
        for name in ours.keys() - {"loss_sum"}:
            torch.testing.assert_close(ours[name], theirs[name].detach(), msg=name)
        loss.backward()
    trained = {name for name, p in frozen.named_parameters() if p.grad is not None}
    assert trained and all(name.startswith(("pre.", "post.")) for name in trained)


def test_resume_repeats_an_uninterrupted_run(bare, config, tmp_path, monkeypatch):
    heads.run(config, tmp_path / "whole")
    step = heads.HeadsTrainer._train_step

    def stop_after_five(trainer):
        trainer.stop = trainer.step == 4
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(heads.HeadsTrainer, "_train_step", stop_after_five)
        heads.run(config, tmp_path / "parts")
    assert len(losses(tmp_path / "parts.train")) == 5
    heads.run(config, tmp_path / "parts")
    assert losses(tmp_path / "parts.train") == losses(tmp_path / "whole.train")
    paths = [tmp_path / name / "forespark" / "heads.safetensors" for name in ("whole", "parts")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert not list((tmp_path / "parts").glob("**/.*"))


def test_unfit_checkpoints_are_refused(bare, config, checkpoint, tmp_path):
    def refuses(word, **changes):
        drafter = dataclasses.replace(config.drafter, **changes)
        with pytest.raises(ValueError, match=word):
            heads.run(dataclasses.replace(config, drafter=drafter))

    refuses(r"no config\.json and no model\.safetensors", dir=str(tmp_path / "absent"))
    refuses(r"got 5, but .* drafts 4 tokens", num_speculative_tokens=5)
    refuses(r"trained with it; use --out", dir=str(checkpoint))
    raw = json.loads((bare / "config.json").read_text())
    write_json(bare / "config.json", {**raw, "speculators_model_type": "dspark"})
    refuses("kind 'dspark'")
    shape = {**raw["transformer_layer_config"], "vocab_size": 61}
    write_json(bare / "config.json", {**raw, "transformer_layer_config": shape})
    refuses("another target: its vocab_size is 61")
    write_json(bare / "config.json", raw)
    weights = bare / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuses("copy the checkpoint again")
    config.target.name = "other"
    refuses("trained for target 'tiny', not 'other'", dir=str(checkpoint))


def test_another_drafters_state_and_copy_are_refused(bare, config, tmp_path):
    config.train.max_steps = 1
    heads.run(config, tmp_path / "copy")
    state = next((tmp_path / "copy.train" / "checkpoints").glob("*")) / "state.json"
    write_json(state, {**read_json(state), "drafter_sha256": "ff"})
    with pytest.raises(ValueError, match="another drafter"):
        heads.run(config, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a copy of"):
        heads.run(config, tmp_path / "copy")


def test_a_calibration_of_other_estimators_is_named(bare, config, tmp_path, capsys):
    config.train.max_steps = 1
    digest = file_sha256(bare / "model.safetensors")
    write_json(tmp_path / "run" / "calibration.json", {"key": {"drafter_sha256": digest}})
    heads.run(config)
    assert "calibrate again" in capsys.readouterr().out
