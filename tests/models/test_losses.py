"""Losses on cases small enough to compute by hand, and the chunked head against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from forespark.models import losses


def test_position_weights_and_mean():
    weights = losses.position_weights(3, 4.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])
    values = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    mask = torch.tensor([[True, True], [True, False]])
    mean = losses.weighted_mean(values, mask, torch.tensor([1.0, 0.5]))
    assert float(mean) == pytest.approx((1 + 1 + 4) / 3, rel=1e-4)
    assert float(losses.weighted_mean(values, torch.zeros(2, 2, dtype=torch.bool))) == 0.0


def test_soft_acceptance_by_hand():
    # P over four tokens is (.4 .3 .2 .1); candidates are tokens 0 and 2; Q = (.75 .25).
    alpha = losses.soft_acceptance(torch.tensor([[0.4, 0.2]]), torch.tensor([[math.log(3.0), 0.0]]))
    assert float(alpha) == pytest.approx(0.4 + 0.2)
    alpha = losses.soft_acceptance(torch.tensor([[0.4, 0.5]]), torch.tensor([[math.log(3.0), 0.0]]))
    assert float(alpha) == pytest.approx(0.4 + 0.25)


def test_accepted_lengths_stop_at_the_first_miss():
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    assert losses.accepted_lengths(correct, mask).tolist() == [2.0, 0.0, 2.0]


def test_estimator_losses_by_hand():
    logits, alpha = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[1.0, 0.5]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    first, second = math.log(2.0), -0.5 * math.log(0.75) - 0.5 * math.log(0.25)
    loss, metrics = losses.pre_draft_loss(logits, alpha, mask, torch.tensor([2.0]))
    assert float(loss) == pytest.approx((first + second) / 2, rel=1e-4)
    assert float(metrics["pre_brier_sum"]) == pytest.approx(0.25 + 0.0625)
    # Survival 0.5 and 0.5 * 0.75, two tokens really accepted.
    assert float(metrics["pre_token_error_sum"]) == pytest.approx(2 - 0.875)
    loss, metrics = losses.post_draft_loss(logits, alpha, mask, 4.0)
    assert float(loss) == pytest.approx((first + math.exp(-0.25) * second) / 2, rel=1e-4)
    # Without a realized count the expected one stands in: 1 + 1 * 0.5.
    assert float(metrics["post_token_error_sum"]) == pytest.approx(1.5 - 0.875)


def test_selector_loss_injects_a_missing_target():
    scores = torch.tensor([[[2.0, 1.0, 9.0], [2.0, 1.0, 0.0]]])  # two candidates, then the target
    has = torch.tensor([[True, False]])
    rank = torch.tensor([[1, 0]])
    loss = losses.selector_loss(scores, has, rank, torch.ones(1, 2, dtype=torch.bool), 4.0)
    first = math.log(1 + math.exp(1.0))  # -log softmax([2, 1])[1]
    second = math.log(1 + math.exp(2.0))  # -log softmax([2, 0])[1]
    assert float(loss) == pytest.approx((first + math.exp(-0.25) * second) / 2, rel=1e-4)


def test_head_loss_on_four_tokens():
    head = torch.eye(4)
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    loss, out = losses.head_loss(q.log(), p.log(), head, torch.tensor([1.0]), top_k=2)
    tv = 1 - (0.1 + 0.2 + 0.1 + 0.1)
    assert float(out["tv"]) == pytest.approx(tv) and float(out["ce"]) == pytest.approx(
        -math.log(0.1)
    )
    assert float(loss) == pytest.approx(-0.1 * math.log(0.1) + 0.9 * tv)
    assert out["ids"].tolist() == [[3, 2, 0]]
    assert out["target_probs"][0].tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("positions", [1, 7, 250])  # below, at odd tail and beyond one chunk
@pytest.mark.parametrize("extra", [False, True])
def test_head_loss_gradient(positions, extra):
    """Against autograd through materialized logits, candidate scores included."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    hidden, target, head = draw(positions, 8), 2 * draw(positions, 8), draw(30, 8)
    offset, weights = draw(30), draw(positions).abs()
    side, table = draw(positions, 3), draw(30, 3)
    inputs = [hidden.requires_grad_(), side.requires_grad_(), table.requires_grad_()]
    more = {"extra": side, "extra_weight": table} if extra else {}
    loss, out = losses.head_loss(hidden, target, head, weights, top_k=4, offset=offset, **more)
    if not extra:
        loss = loss + out["scores"].square().sum()
    got = torch.autograd.grad(loss, inputs, allow_unused=True)

    logits = hidden @ head.T + (side @ table.T if extra else 0)
    p = torch.softmax(target @ head.T + offset, -1)
    q = torch.softmax(logits + offset, -1)
    label = (target @ head.T).argmax(-1)
    ce = -q.gather(-1, label[:, None]).squeeze(-1).log()
    tv = 1 - torch.minimum(p, q).sum(-1)
    want = (weights * (0.1 * ce + 0.9 * tv)).sum()
    if not extra:
        ids = torch.cat([logits.topk(4).indices, label[:, None]], -1)
        want = want + logits.gather(-1, ids).square().sum()
    torch.testing.assert_close(loss, want, atol=1e-4, rtol=1e-5)
    for ours, theirs in zip(got, torch.autograd.grad(want, inputs, allow_unused=True), strict=True):
        if theirs is not None:
            # Sums of float32 terms in another order.
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
