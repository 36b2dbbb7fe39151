"""Drafters against speculators' own forward, labels, length cycling, gradient stops."""

from __future__ import annotations

import pytest
import torch

from forespark.models.base import LossRows, cycle_length, draw_rows
from forespark.models.blocks import Context, draft_hidden, label_mask, select_anchors
from tests.models.conftest import VOCAB, make_row

# Both sides are float32 with sums in another order; a wrong mask or slot errs by > 1e-2.
TOL = {"atol": 2e-5, "rtol": 2e-4}


def _speculators(core, row, anchors, monkeypatch):
    """speculators' loss and hidden states on the given anchors."""
    import speculators.models.dflash.core as module
    from speculators.losses import resolve_loss_config
    from speculators.losses.eager import tv_loss

    monkeypatch.setattr(
        module, "select_anchors", lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    )
    documents = torch.repeat_interleave(torch.arange(len(row.lengths)), torch.tensor(row.lengths))
    arguments = {
        "hidden_states": row.states[None], "input_ids": row.input_ids[None],
        "loss_mask": row.loss_mask[None].long(), "verifier_last_hidden_states": row.last[None],
        "document_ids": documents[None], "position_ids": row.position_ids()[None],
    }  # fmt: skip
    hidden = core._backbone_forward(**arguments, max_anchors=len(anchors))[0]
    _, loss, metrics = core(
        **arguments, max_anchors=len(anchors), tv_loss_fn=tv_loss,
        loss_config=resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager"),
    )  # fmt: skip
    return hidden[0], loss, metrics


@pytest.mark.parametrize("kind", ["forespark_model", "dspark_model"])
def test_same_loss_and_gradient_as_speculators(kind, request, monkeypatch):
    model = request.getfixturevalue(kind)
    row, anchors = make_row(), torch.tensor([5, 7, 8, 18])  # every block inside its document
    k = model.num_speculative_tokens
    assert label_mask(row, anchors, k).all()
    hidden, loss, metrics = _speculators(model.core, row, anchors, monkeypatch)
    width = model.core.config.block_size
    ours = draft_hidden(model.core, Context(model.core, row), anchors, width)
    torch.testing.assert_close(ours.flatten(0, 1), hidden, **TOL)
    trained = [p for p in model.core.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(loss, trained, allow_unused=True)
    if kind == "forespark_model":
        model.options.lambda_pre = model.options.lambda_post = 0.0
    total, got_metrics = model(row, anchors, k, LossRows())
    torch.testing.assert_close(total, loss, **TOL)
    got = torch.autograd.grad(total, trained, allow_unused=True)
    for ours_grad, theirs in zip(got, wanted, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours_grad, theirs, atol=2e-5, rtol=2e-3)
    torch.testing.assert_close(got_metrics["accepted_length_sum"], metrics["eal_sum"])


def test_blocks_crossing_a_documents_end_carry_no_label():
    row = make_row((14, 9))
    mask = label_mask(row, torch.tensor([5, 12, 21]), 4)
    assert mask.tolist() == [[True] * 4, [True, False, False, False], [True, False, False, False]]


def test_nothing_after_a_gap_is_labelled():
    row = make_row((14,))
    row.loss_mask[8] = False  # the user speaks again
    assert label_mask(row, torch.tensor([6]), 4).tolist() == [[True, False, False, False]]


def test_anchors_have_context_and_a_label():
    row = make_row((14, 1, 9), prompt=0)
    chosen = select_anchors(row, None).tolist()
    assert chosen == [*range(1, 13), *range(16, 23)]  # no first token, no last token
    some = select_anchors(row, 5, torch.Generator().manual_seed(1))
    assert (
        some.numel() == 5 and set(some.tolist()) <= set(chosen) and some.equal(some.sort().values)
    )


@pytest.mark.parametrize("lengths", [(14,), (3,), (1,)])
def test_rows_without_labels_give_zero_and_gradients(forespark_model, lengths):
    row = make_row(lengths, prompt=99)
    anchors = select_anchors(row, 8)
    assert anchors.numel() == 0
    loss, metrics = forespark_model(row, anchors, 2, LossRows())
    loss.backward()
    assert float(loss) == 0.0 and metrics == {}


def test_sample_shorter_than_the_block(forespark_model):
    row = make_row((6,), prompt=3)  # three answer tokens, block of five
    loss, metrics = forespark_model(row, select_anchors(row, 8), 4, LossRows())
    loss.backward()
    assert torch.isfinite(loss) and float(metrics["acc4_total"]) == 0.0


def test_length_cycles_from_k():
    assert [cycle_length(s, 4) for s in range(6)] == [4, 1, 2, 3, 4, 1]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_only_the_trained_row_learns_and_nothing_reaches_the_drafter(forespark_model, length):
    model = forespark_model
    torch.nn.init.normal_(model.pre.w_o.weight)
    row = make_row()
    anchors = select_anchors(row, None)
    with_pre, _ = model(row, anchors, length, LossRows())
    model.options.lambda_pre = 0.0
    without, _ = model(row, anchors, length, LossRows())
    core = [p for p in model.core.parameters() if p.requires_grad]
    for a, b in zip(
        torch.autograd.grad(with_pre, core, retain_graph=True, allow_unused=True),
        torch.autograd.grad(without, core, allow_unused=True), strict=True,
    ):  # fmt: skip
        assert (a is None and b is None) or torch.equal(a, b)
    gradient = torch.autograd.grad(with_pre, model.pre.w_o.bias)[0]
    start = length * (length - 1) // 2
    learned = torch.nonzero(gradient).squeeze(-1).tolist()
    assert learned == list(range(start, start + length))


def test_shorter_drafts_are_drafted_anew(forespark_model):
    row, anchors = make_row(), torch.tensor([6, 18])
    context = Context(forespark_model.core, row)
    short = forespark_model.draft(context, anchors, 2)
    assert not torch.allclose(short, forespark_model.draft(context, anchors, 4)[:, :2], atol=1e-3)
    alpha, accepted = forespark_model.acceptance(row, context, anchors, 2, LossRows())
    assert alpha.shape == (2, 2) and ((alpha >= 0) & (alpha <= 1)).all() and (accepted <= 2).all()


def test_packing_does_not_change_a_document(forespark_model):
    both, alone = make_row((14, 9)), make_row((14, 9))
    alone.input_ids, alone.loss_mask = both.input_ids[14:], both.loss_mask[14:]
    alone.states, alone.last, alone.lengths = both.states[14:], both.last[14:], [9]
    core, at = forespark_model.core, torch.tensor([5, 6])
    packed = draft_hidden(core, Context(core, both), at + 14, 5)
    torch.testing.assert_close(packed, draft_hidden(core, Context(core, alone), at, 5), **TOL)


def test_drawn_rows_keep_the_normalizer():
    """The mean over draws of sum exp(z + offset) is the full sum: the estimate is unbiased."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    frequent, needed = torch.tensor([0, 1, 2, 5]), torch.tensor([7, 7, 9])
    rng = torch.Generator().manual_seed(0)
    sums = []
    for _ in range(4000):
        drawn = draw_rows(frequent, needed, 12, VOCAB, rng)
        assert set(drawn.rows[:6].tolist()) == {0, 1, 2, 5, 7, 9}
        sums.append((logits[drawn.rows] + drawn.offset).exp().sum())
    # 4000 draws: standard error about 0.1 %.
    assert float(torch.stack(sums).mean()) == pytest.approx(float(logits.exp().sum()), rel=0.01)


def test_warm_start_copies_the_targets_last_layers(forespark_model):
    from forespark.models.warm_start import COPIED, warm_start

    core = forespark_model.core
    layers = {
        f"model.layers.{i}.{name}.weight": torch.full_like(
            dict(core.layers[0].named_modules())[name].weight, float(i)
        )
        for i in (4, 5)
        for name in COPIED
    }
    warm_start(core, layers, 6)
    assert (core.layers[0].mlp.up_proj.weight == 4).all()
    assert (core.layers[1].self_attn.o_proj.weight == 5).all()
    assert torch.equal(core.hidden_norm.weight, core.layers[0].input_layernorm.weight)
    assert torch.equal(core.norm.weight, core.verifier_norm.weight)
    # Query gain: rows of 32 fours, each times a norm gain of four.
    assert core.layers[0].self_attn.q_norm.weight.tolist() == pytest.approx([16 * 32**0.5] * 8)
    layers["model.layers.4.mlp.up_proj.weight"] = torch.zeros(7, 32)
    with pytest.raises(ValueError, match=r"drafter\.init=random"):
        warm_start(core, layers, 6)
