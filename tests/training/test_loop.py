"""The loop on a tiny target: states, exact resume, export, replay, refusals."""

from __future__ import annotations

import dataclasses
import json
import signal

import pytest
import torch

from forespark.record import read_jsonl
from forespark.training import checkpoint
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import Trainer
from forespark.training.optim import lr_factor, orthogonalize
from forespark.training.replay import load_exported, replay
from forespark.training.rows import read_rows
from forespark.training.run import corpus_sources
from forespark.training.states import LocalStates


def silent(split, values, step):
    return None


def trainer(config, tmp_path, name="forespark", where="a"):
    return Trainer(
        config, drafter_of(config, name), state_cache(config), name=name,
        sources=corpus_sources(config), folder=tmp_path / where / "train",
        out=tmp_path / where / "out",
    )  # fmt: skip


def losses(folder):
    return {
        r["step"]: r["loss"] for r in read_jsonl(folder / "metrics.jsonl") if r["split"] == "train"
    }


def test_local_states_are_the_residual_stream(tiny_target):
    """transformers' own hidden states, but the last one before the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    ids = [5, 9, 11, 2, 30]
    states = LocalStates(str(tiny_target), [0, 2, 3]).fetch(ids)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        for place, layer in enumerate([0, 2, 3]):
            torch.testing.assert_close(states[:, place], out.hidden_states[layer][0])
        torch.testing.assert_close(model.model.norm(states[:, -1]), out.hidden_states[-1][0])
        torch.testing.assert_close(model.lm_head(model.model.norm(states[:, -1])), out.logits[0])


@pytest.mark.parametrize("name", ["forespark", "dspark"])
def test_resume_repeats_the_losses_exactly(config, tmp_path, name):
    whole = trainer(config, tmp_path, name)
    whole.fit(silent)
    config.train.max_steps = 8
    first = trainer(config, tmp_path, name, where="b")
    step = first._train_step

    def stop_after_five():
        first.stop = first.step == 4
        return step()

    first._train_step = stop_after_five
    first.fit(silent)
    assert first.step == 5
    second = trainer(config, tmp_path, name, where="b")
    assert second.resume() and second.step == 5
    second.fit(silent)
    assert losses(tmp_path / "b" / "train") == losses(tmp_path / "a" / "train")
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_kill_loses_only_what_came_after_the_checkpoint(config, tmp_path):
    run = trainer(config, tmp_path)
    step = run._train_step

    def die_at_four():
        if run.step == 4:
            raise RuntimeError("power cut")
        return step()

    run._train_step = die_at_four
    with pytest.raises(RuntimeError):
        run.fit(silent)
    again = trainer(config, tmp_path)
    assert again.resume() and again.step == 3
    assert max(losses(tmp_path / "a" / "train")) == 3


def test_signal_stops_with_a_checkpoint(config, tmp_path):
    run = trainer(config, tmp_path)
    step = run._train_step

    def interrupt():
        if run.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return step()

    run._train_step = interrupt
    run.fit(silent)
    assert (
        run.step == 2
        and checkpoint.latest(tmp_path / "a" / "train" / "checkpoints").name == "step-2"
    )


def test_damaged_or_foreign_checkpoints_are_refused(config, tmp_path):
    run = trainer(config, tmp_path)
    run.fit(silent)
    path = checkpoint.latest(tmp_path / "a" / "train" / "checkpoints")
    wider = dataclasses.replace(
        config, drafter=dataclasses.replace(config.drafter, selector_rank=6)
    )
    with pytest.raises(ValueError, match="not a checkpoint of this drafter"):
        trainer(wider, tmp_path).resume()
    tensors = path / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(ValueError, match="corrupt or truncated"):
        trainer(config, tmp_path).resume()


@pytest.mark.parametrize("name", ["forespark", "dspark"])
def test_export_is_what_stock_vllm_reads_and_replay_drafts_with_it(config, tmp_path, name):
    run = trainer(config, tmp_path, name)
    out = run.fit(silent)
    from safetensors.torch import load_file

    stored = load_file(out / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in stored.values())
    assert not any(n.startswith(("embed_tokens", "lm_head", "verifier_")) for n in stored)
    raw = json.loads((out / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [0, 2, 3] and raw["mask_token_id"] == 1
    assert (out / "forespark" / "heads.json").exists() == (name == "forespark")

    model = load_exported(config, name, out)
    row = read_rows(corpus_sources(config))[0]
    source = LocalStates(config.target.model, config.target.target_layer_ids)
    found = replay(model, source, row.input_ids, range(2, len(row.input_ids) - 1))
    assert all(len(r.drafts) == 4 and 0 <= r.accepted <= 4 and len(r.logits) == 4 for r in found)
    assert all((r.z is None) == (name == "dspark") for r in found)
    short = replay(model, source, row.input_ids, [3], length=2)
    assert len(short[0].drafts) == 2
    with pytest.raises(ValueError, match=r"want 1\.\.4"):
        replay(model, source, row.input_ids, [3], length=5)
    with pytest.raises(ValueError, match="no such drafter"):
        load_exported(config, name, tmp_path / "absent")


def test_replay_counts_as_the_training_metric_does(config, tmp_path):
    """Teacher-forced counting in the loss equals the drafter's own walk, anchor by anchor."""
    from forespark.models.base import LossRows
    from forespark.models.blocks import Context, Row, label_mask

    model = drafter_of(config, "forespark").eval()
    source = LocalStates(config.target.model, config.target.target_layer_ids)
    # A greedy continuation of the tiny target: what serving would verify against.
    ids = [7, 3, 12, 40]
    head = model.core.lm_head.weight
    for _ in range(20):
        last = source.fetch(ids)[-1:, -1]
        ids.append(int((model.core.verifier_norm(last) @ head.T).argmax()))
    states = source.fetch(ids)
    row = Row(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), [len(ids)],
              states[:, :-1].flatten(1), states[:, -1])  # fmt: skip
    anchors = torch.arange(4, 18)
    assert label_mask(row, anchors, 4).all()
    _, counts = model.acceptance(row, Context(model.core, row), anchors, 4, LossRows())
    walked = replay(model, source, ids, anchors.tolist())
    assert [r.accepted for r in walked] == counts.int().tolist()


def test_stock_vllm_reads_the_exported_config(config, tmp_path):
    """The registry's own translation: layer ids minus one, mask token, selector sizes."""
    pytest.importorskip("vllm")
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    out = trainer(config, tmp_path).fit(silent)
    parsed = SpeculatorsConfig.from_pretrained(str(out))
    assert parsed.architectures == ["DFlash2DraftModel"]
    assert parsed.eagle_aux_hidden_state_layer_ids == [0, 2, 3]
    assert parsed.dflash_config["target_layer_ids"] == [-1, 1, 2]
    assert parsed.dflash_config["mask_token_id"] == 1 and not parsed.dflash_config["causal"]
    assert parsed.dflash_config["selector_rank"] == 4
    raw = json.loads((out / "config.json").read_text())
    assert SpeculatorsConfig.extract_vllm_speculative_config(raw)["num_speculative_tokens"] == 4


def test_learning_rate_schedules():
    def at(progress: float, schedule: str = "wsd") -> float:
        return lr_factor(schedule, 100, 10, progress, 0.25)

    assert at(0.0) == at(0.75) == 1.0 and at(0.875) == pytest.approx(0.5) and at(1.0) == 0.0
    assert at(0.5, "cosine") == pytest.approx(0.5)
    assert lr_factor("wsd", 0, 10, 0.0, 0.25) == pytest.approx(0.1)


@pytest.mark.parametrize("shape", [(8, 8), (24, 6), (5, 30)])
def test_orthogonalized_updates_have_unit_singular_values(shape):
    values = torch.linalg.svdvals(
        orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    )
    # The quintic iteration settles between 0.68 and 1.13.
    assert values.max() < 1.25 and values.min() > 0.3


def test_cross_entropy_warms_up_alone(config, tmp_path):
    config.train.ce_warmup_steps = 1
    run = trainer(config, tmp_path)
    run._start_epoch()
    weights = []
    for _ in range(2):
        run._train_step()
        weights.append((run.model.options.ce_weight, run.model.options.tv_weight))
        run.step, run.batch = run.step + 1, run.batch + 1
    assert weights == [(1.0, 0.0), (0.1, 0.9)]


def test_scaled_states_are_folded_into_the_exported_fusion(config, tmp_path):
    from forespark.models.blocks import Context

    run = trainer(config, tmp_path)
    out = run.fit(silent)
    scale = run.model.core.fc.input_scale
    assert not torch.allclose(scale, torch.ones_like(scale), atol=0.1)
    row = run.states.row([run.corpus[run.order[0]]])
    served = load_exported(config, "forespark", out)
    with torch.no_grad():
        trained = Context(run.model.core, row).features
        # The export rounds weights to bfloat16: 2^-8 of each, less over a sum.
        torch.testing.assert_close(
            Context(served.core, row).features, trained, atol=0.05, rtol=0.05
        )
    again = trainer(config, tmp_path)
    again.resume()
    assert torch.equal(again.model.core.fc.input_scale, scale)
