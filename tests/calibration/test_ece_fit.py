"""Fits on synthetic drafts whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit, logit

from forespark.calibration.ece import ece
from forespark.calibration.fit import fit_all, fit_cell, fit_post, fit_pre, theta_grid
from forespark.calibration.traces import Drafts, Traces


def simulate(rng, true_logits):
    """Accepted counts [S] of drafts whose position logits [S, d] are the truth."""
    ok = rng.random(true_logits.shape) < expit(true_logits)
    return ok.cumprod(axis=1).sum(axis=1)


def test_ece_by_hand():
    p = np.array([0.1, 0.1, 0.9, 1.0])
    y = np.array([0, 1, 1, 1])
    # bins 1 and 13, 14 of 15: |0.2 - 1| + |0.9 - 1| + |1 - 1| over 4 samples
    assert ece(p, y) == pytest.approx((0.8 + 0.1 + 0.0) / 4)


def test_ece_edges():
    assert math.isnan(ece(np.zeros(0), np.zeros(0)))
    assert ece(np.ones(5), np.ones(5)) == 0
    assert ece(np.zeros(5), np.ones(5)) == 1
    # Certainty shares the last bin: errors of opposite sign cancel there.
    assert ece(np.array([0.95, 1.0]), np.array([1, 0])) == pytest.approx(0.95 / 2)
    for bad in ([np.nan], [1.1], [-0.1]):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            ece(np.array(bad), np.array([1]))
    with pytest.raises(ValueError, match="one outcome"):
        ece(np.zeros(3), np.zeros(2))


def test_grid_is_the_papers():
    grid = theta_grid()
    assert len(grid) == 41
    assert grid[[0, 20, 40]] == pytest.approx([0.1, 1.0, 10.0])
    assert np.ptp(np.diff(np.log(grid))) < 1e-12


def test_post_fit_recovers_temperatures_and_lowers_ece():
    rng = np.random.default_rng(0)
    true = rng.normal(1.0, 1.5, (40_000, 3))
    theta = np.array([2.0, 0.5, 1.0])
    fit = fit_post(true * theta, simulate(rng, true))
    # Grid step is 12 %; sampling noise of later positions allows two steps.
    np.testing.assert_allclose(fit.theta, theta, rtol=0.27)
    assert fit.ece_after[0] < 0.25 * fit.ece_before[0]
    assert fit.ece_after[1] < 0.25 * fit.ece_before[1]
    assert fit.samples == [40_000] * 3


@pytest.mark.parametrize("accepted", [0, 2])
def test_post_fit_with_one_outcome_keeps_theta(accepted):
    fit = fit_post(np.ones((200, 2)), np.full(200, accepted))
    assert fit.theta == [1.0, 1.0]


def test_post_fit_without_drafts():
    fit = fit_post(np.zeros((0, 3)), np.zeros(0, dtype=int))
    assert fit.theta == [1.0] * 3
    assert fit.ece_before == fit.ece_after == [None] * 3
    with pytest.raises(ValueError, match="without NaN"):
        fit_post(np.full((2, 2), np.nan), np.zeros(2, dtype=int))


def test_pre_fit_recovers_scale_and_bias_of_every_entry():
    rng = np.random.default_rng(1)
    K, S = 3, 30_000
    drafts, scales, biases = {}, {}, {}
    for d in range(1, K + 1):
        z = rng.normal(0.5, 1.2, (S, d))
        scales[d], biases[d] = rng.uniform(0.5, 1.8, d), rng.uniform(-0.7, 1.0, d)
        drafts[d] = Drafts(simulate(rng, scales[d] * z + biases[d]), z, None)
    fit = fit_pre(drafts, K)
    for d in range(1, K + 1):
        np.testing.assert_allclose(fit.scale[d - 1], scales[d], atol=0.12)
        np.testing.assert_allclose(fit.bias[d - 1], biases[d], atol=0.12)
        assert fit.samples[d - 1][0] == S
        assert fit.samples[d - 1] == sorted(fit.samples[d - 1], reverse=True)
    assert not any(map(any, fit.kept))
    for before, after in zip(fit.ece_before, fit.ece_after, strict=True):
        assert after < 0.02 < before


def test_row_form_reads_the_longest_run_only():
    rng = np.random.default_rng(2)
    z = rng.normal(0, 1, (5000, 2))
    long_run = Drafts(simulate(rng, z + 1), z, None)
    misleading = Drafts(np.zeros(5000, dtype=int), z[:, :1], None)
    fit = fit_pre({1: misleading, 2: long_run}, 2, form="row")
    assert [len(r) for r in fit.scale] == [2]
    np.testing.assert_allclose(fit.bias[0], [1, 1], atol=0.15)


def test_first_tokens_condition_the_fit():
    """Position 2 is fitted on drafts whose first token was accepted, and only those."""
    rng = np.random.default_rng(3)
    z = np.zeros((20_000, 2))
    z[:, 1] = rng.normal(0, 1, 20_000)
    accepted = simulate(rng, np.column_stack([np.full(20_000, -1.0), z[:, 1]]))
    fit = fit_pre({2: Drafts(accepted, z, None)}, 2)
    assert fit.samples[1] == [20_000, int((accepted >= 1).sum())]
    assert fit.bias[1][1] == pytest.approx(0, abs=0.1)  # unconditioned it would be below -1


def test_cells_that_keep_their_scale():
    rng = np.random.default_rng(4)
    z = rng.normal(0, 1, 400)
    scale, bias, kept = fit_cell(z[:10], np.ones(10, dtype=bool), 50)
    assert (scale, kept) == (1.0, True)
    assert 0 < bias < 1, "ten acceptances move the bias up, but not far"
    scale, bias, kept = fit_cell(z, np.ones(400, dtype=bool), 50)
    assert (scale, kept) == (1.0, True)
    assert 1 < bias < 5, "all accepted: finite"
    scale, bias, kept = fit_cell(z, z < 0, 50)  # upside down
    assert (scale, kept) == (1.0, True)
    assert abs(bias) < 0.5
    assert fit_cell(z[:0], np.zeros(0, dtype=bool), 50) == (1.0, 0.0, True)


def test_separable_outcomes_stay_finite():
    z = np.linspace(-2, 2, 200)
    scale, bias, kept = fit_cell(z, z > 0, 50)
    assert not kept
    assert 1 < scale < 50
    assert abs(bias) < 1


def test_missing_length_is_kept_and_counted():
    z = np.full((100, 1), logit(0.5))
    fit = fit_pre({1: Drafts(np.arange(100) % 2, z, None)}, 2)
    assert fit.samples == [[100], [0, 0]]
    assert fit.kept[1] == [True, True]
    assert fit.bias[1] == [0.0, 0.0]
    assert fit.ece_after[1] is None
    with pytest.raises(ValueError, match="pre-draft logits"):
        fit_pre({1: Drafts(np.zeros(3, dtype=int), None, None)}, 1)


def test_fit_all_makes_a_whole_calibration():
    rng = np.random.default_rng(5)
    key = {"target": "t", "drafter": "forespark", "drafter_sha256": "x", "K": 2}
    logits = {d: rng.normal(0.5, 1, (3000, d)) for d in (1, 2)}
    drafts = {d: Drafts(simulate(rng, x), x, x / 2) for d, x in logits.items()}
    fit = fit_all(Traces(drafts, "triangle"), key)
    assert fit.pre.samples[1][0] == 3000
    assert fit.post.theta[0] == pytest.approx(0.5, rel=0.3)
    assert fit_all(Traces({2: drafts[2]}, None), key).pre is None
    with pytest.raises(ValueError, match=r"length 2.*calibrate\.py --target t"):
        fit_all(Traces({1: drafts[1]}, "triangle"), key)
