"""Survival and envelope twins against their plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forespark.fore_d.envelope import (
    scores,
    scores_device,
    scores_from_logits,
    scores_host,
    scores_reference,
)
from forespark.fore_d.prior import fill_missing, prior_scores
from forespark.fore_d.survival import (
    entries,
    last_row,
    post_survival,
    post_survival_reference,
    rewards,
    survival,
    survival_reference,
)

# Both sides: one sigmoid and at most 15 products in float32. A wrong row offset or a
# missing product errs by more than 1e-2.
TOL = {"atol": 2e-6, "rtol": 2e-5}


@pytest.mark.parametrize("form", ["triangle", "row"])
@pytest.mark.parametrize(("R", "K"), [(0, 4), (1, 1), (3, 7), (40, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_survival_matches_reference(R, K, form, dtype):
    T = entries(K, form)
    rng = torch.Generator().manual_seed(R)
    z = (3 * torch.randn(R, T, generator=rng)).to(dtype)
    z[:1, 0], z[1:2, -1] = 90.0, -800.0  # saturated both ways
    scale, bias = torch.linspace(0.5, 1.5, T), torch.linspace(-1, 1, T)
    S, bad = survival(z, scale, bias, K, form)
    want, want_bad = survival_reference(z.double().numpy(), scale.numpy(), bias.numpy(), K, form)
    np.testing.assert_allclose(S.numpy(), want, **TOL)
    assert bad.tolist() == want_bad.tolist() == [False] * R
    assert (S.diff(dim=2) <= 0).all()


def test_figure_5_reward():
    """The paper's length-3 draft with survivals 0.9, 0.7, 0.3 is worth 1.9 tokens."""
    accept = torch.tensor([0.9, 0.7 / 0.9, 0.3 / 0.7])
    z = torch.zeros(1, 6)
    z[0, 3:] = torch.logit(accept)
    S, _ = survival(z, torch.ones(6), torch.zeros(6), 3)
    torch.testing.assert_close(rewards(S)[0, 2].item(), 1.9, atol=1e-5, rtol=0)
    torch.testing.assert_close(last_row(z, 3), z[:, 3:])


def test_row_form_is_a_prefix_of_one_curve():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    S, _ = survival(z, torch.ones(4), torch.zeros(4), 4, "row")
    for d in range(1, 5):
        torch.testing.assert_close(S[:, d - 1, :d], S[:, 3, :d])


def test_nan_zeroes_its_request_alone_and_is_counted():
    z = torch.zeros(3, entries(4, "triangle"))
    z[1, 7] = torch.nan
    z[2, 0] = torch.inf  # not a NaN: certain acceptance
    S, bad = survival(z, torch.ones(10), torch.zeros(10), 4)
    assert bad.tolist() == [False, True, False]
    assert S[1].abs().sum() == 0
    assert S[2, 0, 0] == 1
    g, _ = scores_from_logits(z, torch.ones(10), torch.zeros(10), 4)
    assert not g.isnan().any()
    assert g[1].sum() == 0


@pytest.mark.parametrize("shape", [(2, 9), (2, 11), (10,)])
def test_wrong_width_is_refused(shape):
    with pytest.raises(ValueError, match=r"want \[R, 10\]"):
        survival(torch.zeros(shape), torch.ones(10), torch.zeros(10), 4)


def test_post_survival_matches_reference_and_ignores_what_was_not_drafted():
    rng = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 5, generator=rng)
    lengths = torch.tensor([0, 1, 3, 5, 5, 2])
    logits[4, 2] = torch.nan  # drafted: the request is bad
    logits[5, 4] = torch.nan  # past the end: ignored
    theta = torch.tensor([0.1, 0.5, 1.0, 2.0, 10.0])
    S, bad = post_survival(logits, theta, lengths)
    want, want_bad = post_survival_reference(logits.numpy(), theta.tolist(), lengths.tolist())
    np.testing.assert_allclose(S.numpy(), want, **TOL)
    assert bad.tolist() == want_bad.tolist() == [False, False, False, False, True, False]


# A falling reward, a late jump (envelope spreads it), ties, and no reward at all.
CURVES = [
    [0.5, 0.4, 0.3],
    [0.1, 0.2, 2.0],
    [0.5, 1.0, 1.5],
    [0.0, 0.0, 0.0],
    [0.9, 1.6, 1.9],
]


@pytest.mark.parametrize("curve", CURVES)
def test_envelope_is_the_smallest_concave_majorant(curve):
    g = scores_reference(curve)
    F = np.concatenate([[0], np.cumsum(g)])
    running = np.maximum.accumulate([0.0, *curve])
    assert (running - 1e-12 <= F).all()
    assert (np.diff(g) <= 1e-12).all()
    corners = [d for d in range(1, len(curve)) if g[d] < g[d - 1] - 1e-12]
    # Where it bends it touches the curve; a larger function would not have to.
    np.testing.assert_allclose(F[corners], running[corners])
    np.testing.assert_allclose(F[-1], running[-1])


def test_concave_reward_is_left_unchanged():
    np.testing.assert_allclose(scores_reference([0.9, 1.6, 1.9]), [0.9, 0.7, 0.3])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.floats(0, 15, width=32), min_size=7, max_size=7), max_size=6))
def test_envelope_twins_agree(rows):
    reward = np.array(rows, dtype=np.float32).reshape(-1, 7)
    want = np.array([scores_reference(row) for row in reward]).reshape(-1, 7)
    np.testing.assert_allclose(scores_host(reward), want, atol=1e-12)
    for twin in (scores, scores_device):
        g = twin(torch.from_numpy(reward))
        assert g.dtype == torch.float32
        # float32 differences of values up to 15
        np.testing.assert_allclose(g.numpy(), want, atol=1e-5)
        assert (g >= 0).all()
        assert (g.diff(dim=1) <= 0).all()  # exactly, in floating point


def test_spread_scores_are_bit_equal():
    """A late jump makes one hull segment: its scores must tie for the split's tie rule."""
    reward = torch.tensor([[0.1, 0.3, 0.7, 2.3]])
    assert scores(reward).unique().numel() == 1
    assert scores_device(reward).unique().numel() == 1


def test_new_requests_get_the_mean_then_the_prior():
    g = np.array([[0.8, 0.4], [9.0, 9.0], [0.4, 0.2]], dtype=np.float32)
    known = np.array([True, False, True])
    prior = prior_scores(0.5, 2)
    np.testing.assert_allclose(fill_missing(g, known, prior)[1], [0.6, 0.3], rtol=1e-6)
    np.testing.assert_allclose(fill_missing(g, known & False, prior), [[0.5, 0.25]] * 3)
    assert g[1, 0] == 9.0, "the caller's array is untouched"
    with pytest.raises(ValueError, match="prior_acceptance"):
        prior_scores(1.0, 4)
