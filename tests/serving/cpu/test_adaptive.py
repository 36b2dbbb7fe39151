"""Twins of the online acceptance estimator against vLLM's kernels."""

from __future__ import annotations

import pytest
import torch
from kernel_twins import beside

MODULE = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator"
KERNELS = (
    "_accumulate_kernel",
    "_refit_kernel",
    "_local_max_sumexp_kernel",
    "_predict_kernel",
)
SLOTS, K = 6, 3


@pytest.fixture
def estimator():
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    return OnlineAcceptanceEstimator(SLOTS, K, torch.device("cpu"))


def _logits(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, width + 2, generator=rng)[:, :width]


TEMPERATURE = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.5, 1.0])


@pytest.mark.parametrize("width", [5, 4096, 5000], ids=["candidates", "one block", "odd tail"])
def test_predict_a_whole_block(estimator, width):
    """DFlash 2: K rows per request, the last request padded."""
    slots = torch.tensor([4, 0, -1], dtype=torch.int32).repeat_interleave(K)
    confidences = torch.full((SLOTS, K), -7.0)
    steps = torch.arange(K, dtype=torch.int32).repeat(3)
    with beside(MODULE, *KERNELS) as pairs:
        estimator.predict(_logits(3 * K, width), slots, steps, confidences, TEMPERATURE)
    assert pairs["_predict_kernel"].launches == 1
    assert ((confidences[:2] > 0) & (confidences[:2] < 1)).all()
    assert (confidences[2:] == -7).all()


def test_predict_one_step_of_every_request(estimator):
    """Autoregressive and Markov drafters: one row per request, slots read with a stride."""
    slots = torch.tensor([[4, 9], [0, 9], [2, 9]], dtype=torch.int32)[:, 0]
    confidences = torch.zeros(SLOTS, K)
    with beside(MODULE, *KERNELS):
        for step in range(K):
            estimator.predict(
                _logits(3, 40, step), slots, torch.tensor(step), confidences, TEMPERATURE
            )


def test_certain_and_broken_rows(estimator):
    """One token with all the mass gives the largest log-odds; NaN does not spread."""
    logits = torch.full((3, 8), -float("inf"))
    logits[0, 3] = 2.0
    logits[1] = 0.0
    logits[2, :2] = torch.tensor([float("nan"), 1.0])
    confidences = torch.zeros(SLOTS, K)
    slots = torch.tensor([1, 2, 3], dtype=torch.int32)
    with beside(MODULE, *KERNELS):
        estimator.predict(logits, slots, torch.tensor(0), confidences, TEMPERATURE)
    assert estimator.features[1, 0] == 40.0
    assert torch.isfinite(confidences[:2]).all()


def test_accumulate_and_refit(estimator):
    """Ragged verdicts, a prefilling request, refused and wholly accepted drafts, two refits."""
    estimator.REFIT_INTERVAL = 4
    rng = torch.Generator().manual_seed(0)
    slots = torch.tensor([3, 1, 5, 0], dtype=torch.int32)
    steps = torch.arange(K, dtype=torch.int32).repeat(4)
    confidences = torch.zeros(SLOTS, K)
    with beside(MODULE, *KERNELS) as pairs:
        for round_ in range(8):
            estimator.predict(
                _logits(4 * K, 6, round_), slots.repeat_interleave(K), steps, confidences,
                TEMPERATURE,
            )  # fmt: skip
            accepted = torch.randint(0, K + 1, (4,), generator=rng, dtype=torch.int32)
            sampled, rejected = accepted + 1, K - accepted
            sampled[0], rejected[0] = 0, 0  # still prefilling
            estimator.step(slots, sampled, rejected)
    assert pairs["_accumulate_kernel"].launches == 8
    assert pairs["_refit_kernel"].launches == 2
    assert estimator.slope.item() != 0.5
    assert (estimator.counts == 0).all()


def test_refit_without_samples_keeps_the_coefficients(estimator):
    estimator.REFIT_INTERVAL = 1
    before = estimator.slope.clone(), estimator.intercepts.clone()
    nothing = torch.zeros(0, dtype=torch.int32)
    with beside(MODULE, *KERNELS):
        estimator.step(nothing, nothing, nothing)
    torch.testing.assert_close((estimator.slope, estimator.intercepts), before)


def test_refit_drops_a_step_that_is_not_a_number(estimator):
    estimator.REFIT_INTERVAL = 1
    estimator.grad[1, 0] = float("nan")
    estimator.counts[:] = 10
    nothing = torch.zeros(0, dtype=torch.int32)
    with beside(MODULE, *KERNELS):
        estimator.step(nothing, nothing, nothing)
    assert estimator.slope.item() == 0.5
