"""The running refit: fair to censored outcomes, near the batch fit, still where nothing comes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forespark.fore_d.online import SCALE_ROOM, Memory, OnlineCalibration, outcomes
from forespark.fore_d.survival import entries, row_offset

K, SLOTS = 3, 64


def make(memory: Memory | None = None, form: str = "triangle") -> OnlineCalibration:
    T = entries(K, form)
    return OnlineCalibration(
        SLOTS, K, form, torch.ones(T), torch.zeros(T), torch.ones(K), memory or Memory()
    )


def test_outcomes_by_hand():
    survives = torch.full((5, K), 0.5)
    d = torch.tensor([3, 3, 3, 0, 2])
    v = torch.tensor([3, 2, 1, 0, 0])
    a = torch.tensor([1, 2, 0, 0, 0])
    happened, weight, known = outcomes(d, v, a, survives)
    assert weight.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0.5, 0]]
    assert known.tolist() == [
        [True, True, False], [True, True, False], [True, False, False], [False] * 3, [False] * 3,
    ]  # fmt: skip
    assert happened[0, :2].tolist() == [1, 0] and happened[1].tolist() == [1, 1, 0.5]
    assert happened[2, 0] == 0 and happened[4, 0] == 0.5


def rounds(world, online, count, censor):
    """Drafts of length K whose true acceptance differs from what the estimators say."""
    rng = np.random.default_rng(0)
    slots = torch.arange(SLOTS)
    lengths = torch.full((SLOTS,), K)
    for _ in range(count):
        shared = rng.normal(size=(SLOTS, K))  # what both estimators see
        z, post = shared + 0.0, shared * 2 + rng.normal(size=(SLOTS, K))
        truth = world(post)
        hits = rng.random((SLOTS, K)) < truth
        verified = np.full(SLOTS, K)
        if censor:  # as the engine does: by post-draft survival
            survival = (1 / (1 + np.exp(-post / online.theta.numpy()))).cumprod(axis=1)
            verified = (survival > 0.35).sum(axis=1)
        accepted = np.minimum(hits.cumprod(axis=1).sum(axis=1), verified)
        logits = torch.zeros(SLOTS, entries(K, online.form))
        logits[:, row_offset(K, online.form) :] = torch.from_numpy(z).float()
        online.remember(slots, lengths, logits, torch.from_numpy(post).float())
        sampled, rejected = torch.from_numpy(accepted + 1), torch.from_numpy(verified - accepted)
        online.learn(slots, sampled.int(), rejected.int())


def ideal(world):
    """(scale, bias) of a logistic fit of the true, uncensored acceptance by z alone."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(1)
    z = rng.normal(size=40_000)
    truth = world(z * 2 + rng.normal(size=z.size))

    def loss(x):
        logit = x[0] * z + x[1]
        return float((np.logaddexp(0, logit) - truth * logit).mean())

    return minimize(loss, np.array([1.0, 0.0])).x


@pytest.mark.parametrize("censor", [False, True])
@pytest.mark.parametrize("form", ["triangle", "row"])
def test_it_finds_the_new_workload_also_through_censored_outcomes(censor, form):
    def world(logits):
        return 1 / (1 + np.exp(-logits / 1.6))

    online = make(Memory(samples=20_000), form)
    rounds(world, online, 400, censor)
    assert online.theta.tolist() == pytest.approx([1.6] * K, abs=0.2)
    last = slice(row_offset(K, form), None)
    scale, bias = ideal(world)
    assert online.scale[last].tolist() == pytest.approx([scale] * K, abs=0.15)
    assert online.bias[last].tolist() == pytest.approx([bias] * K, abs=0.15)


def test_counting_what_was_verified_alone_would_be_unfair(monkeypatch):
    """Why unverified positions are guessed: verified ones are the confident ones."""

    def world(logits):
        return 1 / (1 + np.exp(-logits))

    fair, naive = make(Memory(samples=20_000), "row"), make(Memory(samples=20_000), "row")
    rounds(world, fair, 300, True)

    def only_known(*args):
        happened, weight, known = outcomes(*args)
        return happened, weight * known, known

    monkeypatch.setattr("forespark.fore_d.online.outcomes", only_known)
    rounds(world, naive, 300, True)
    bias = ideal(world)[1]
    assert abs(float(naive.bias[0]) - bias) > 2 * abs(float(fair.bias[0]) - bias) + 0.1


def test_what_is_never_drafted_stays_as_it_was():
    online = make()
    rounds(lambda logits: np.full_like(logits, 0.2), online, 20, False)
    unused = slice(0, row_offset(K, "triangle"))
    assert online.scale[unused].tolist() == [1.0] * 3 and online.bias[unused].tolist() == [0.0] * 3
    assert float(online.bias[-1]) < -0.3
    assert float(online.scale.min()) >= 1 / SCALE_ROOM


def test_prefilling_requests_and_emptied_slots_teach_nothing():
    online, slots = make(), torch.tensor([0, 1])
    ones = torch.ones(2, entries(K, "triangle"))
    online.remember(slots, torch.tensor([K, K]), ones, torch.ones(2, K))
    online.forget(1)
    online.learn(slots, torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert torch.equal(online.scale, torch.ones_like(online.scale))
    assert torch.equal(online.theta, torch.ones(K))


def test_memory_refuses_what_cannot_be_meant():
    with pytest.raises(ValueError, match="want both above 0"):
        Memory(samples=0)
