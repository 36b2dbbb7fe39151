"""Directional drafters: causal blocks, one row of estimates, training, export, replay."""

from __future__ import annotations

import json

import pytest
import torch

from forespark.models.base import LossRows
from forespark.models.blocks import Context, label_mask, select_anchors
from forespark.models.estimators import load_heads
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import Trainer
from forespark.training.replay import load_exported, replay
from forespark.training.rows import read_rows
from forespark.training.run import corpus_sources
from forespark.training.states import LocalStates

NAMES = pytest.mark.parametrize("name", ["forespark", "dspark"])


@pytest.fixture
def directional(config):
    config.drafter.directional = True
    config.train.max_steps = 5
    return config


def random_drafter(config, name="forespark", convolved=True):
    """Random weights, in the convolutions too (fresh ones are identities) where wanted."""
    model = drafter_of(config, name).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for part, parameter in model.core.layers.named_parameters():
            if convolved or "_conv" not in part:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    row = state_cache(config).row(read_rows(corpus_sources(config))[:3], 48)
    return model, row, select_anchors(row, None)


@NAMES
def test_a_short_draft_is_the_beginning_of_a_long_one(directional, name):
    model, row, anchors = random_drafter(directional, name)
    with torch.no_grad():
        context = Context(model.core, row)
        whole = model.draft(context, anchors, 4)
        for length in (1, 3):
            short = model.draft(context, anchors, length)
            torch.testing.assert_close(short, whole[:, :length])
        model.directional = False
        both_ways = model.draft(context, anchors, 4)
        assert not torch.allclose(model.draft(context, anchors, 3), both_ways[:, :3], atol=1e-3)


def test_a_causal_slot_ends_a_bidirectional_block(directional):
    """In one layer, slot w sees what the last slot of a block of w + 1 sees."""
    model, row, anchors = random_drafter(directional, convolved=False)
    model.core.layers = model.core.layers[:1]
    with torch.no_grad():
        context = Context(model.core, row)
        causal = model.draft(context, anchors, 4)
        model.directional = False
        for length in range(1, 5):
            last = model.draft(context, anchors, length)[:, -1]
            torch.testing.assert_close(causal[:, length - 1], last)


@NAMES
def test_every_step_labels_the_one_row(directional, name):
    model, row, anchors = random_drafter(directional, name)
    _, full = model(row, anchors, 4, LossRows())
    _, short = model(row, anchors, 1, LossRows())
    for metric in ("pre_bce_sum", "pre_bce_total"):
        assert full[metric] == short[metric]
    assert full["pre_bce_total"] == label_mask(row, anchors, 4).sum()


@NAMES
def test_trained_exported_and_read_as_causal(directional, tmp_path, name):
    trained = drafter_of(directional, name)
    out = Trainer(
        directional, trained, state_cache(directional), name=name,
        sources=corpus_sources(directional), folder=tmp_path / "train", out=tmp_path / "out",
    ).fit(lambda split, values, step: None)  # fmt: skip
    pre, post, meta = load_heads(out / "forespark", drafter=out / "model.safetensors")
    assert meta.form == pre.form == "row" and tuple(pre.w_o.weight.shape) == (4, 4)
    if name == "dspark":
        assert post.w.numel() == trained.core.confidence_head.proj.in_features

    directional.drafter.directional = False  # the checkpoint knows
    model = load_exported(directional, name, out)
    source = LocalStates(directional.target.model, directional.target.target_layer_ids)
    ids = read_rows(corpus_sources(directional))[0].input_ids
    (long,), (short,) = (replay(model, source, ids, [3], length=d) for d in (4, 2))
    assert short.drafts == long.drafts[:2] and short.z == long.z[:2]
    torch.testing.assert_close(torch.tensor(short.logits), torch.tensor(long.logits[:2]))

    pytest.importorskip("vllm")
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    raw = json.loads((out / "config.json").read_text())
    read = SpeculatorsConfig.from_pretrained(str(out))
    if name == "forespark":
        assert raw["sliding_window_non_causal"] is False
        assert read.dflash_config["causal"] is True
    else:
        assert read.is_causal is True and read.dspark_bonus_anchor is True
        assert read.block_size == 5
