"""Split and distribute: exact totals, prefixes, ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forespark.fore_d.split import distribute, split, top_prefix, top_prefix_reference


def test_ties_go_to_the_smaller_position_then_the_lower_request():
    g = torch.full((3, 4), 0.5)
    assert split(g, 4).tolist() == [2, 1, 1]
    assert split(g, 2).tolist() == [1, 1, 0]


def test_large_tied_batch_keeps_the_rule():
    """An unstable sort passes on a dozen entries and fails here."""
    g = torch.full((300, 15), 0.25)
    d = split(g, 300 * 7 + 11)
    assert d.tolist() == [8] * 11 + [7] * 289


def test_zero_scores_fill_up_in_tie_order():
    g = torch.zeros(3, 3)
    g[2, 0] = 0.9
    assert split(g, 3).tolist() == [1, 1, 1]
    assert split(g, 99).tolist() == [3, 3, 3]


def test_limits_keep_requests_out():
    g = torch.full((3, 3), 0.5)
    assert split(g, 4, torch.tensor([0, 1, 3])).tolist() == [0, 1, 3]


def test_rounding_that_lifts_a_later_position_does_not_break_the_prefix():
    S = torch.tensor([[0.5, 0.5 + 6e-8, 0.9], [0.6, 0.4, 0.3]])
    assert distribute(S, torch.tensor([3, 3]), 2).tolist() == [1, 1]


def test_nan_is_never_chosen_before_a_number():
    S = torch.tensor([[torch.nan, 0.9, 0.9], [0.2, torch.nan, 0.8], [0.1, 0.05, 0.01]])
    v = distribute(S, torch.tensor([3, 3, 3]), 4)
    assert v.tolist() == [0, 1, 3]


def test_only_drafted_positions_are_verified():
    S = torch.full((2, 4), 0.9)
    assert distribute(S, torch.tensor([1, 2]), 3).tolist() == [1, 2]
    assert distribute(S, torch.tensor([0, 0]), 5).tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batch(shape):
    assert top_prefix(torch.zeros(shape), torch.zeros(shape[0]), 2).tolist() == [0] * shape[0]


def test_bad_totals_are_refused():
    with pytest.raises(ValueError, match="total"):
        split(torch.zeros(2, 2), -1)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        top_prefix_reference(np.zeros((2, 2)), [1, 2], 4)


def test_random_shares_match_the_reference():
    """3,000 draws with many equal values, NaN and uneven limits."""
    rng = np.random.default_rng(0)
    for _ in range(3000):
        R, K = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        values = np.round(rng.random((R, K)), 1).astype(np.float32)
        values[rng.random((R, K)) < 0.05] = np.nan
        limits = rng.integers(0, K + 1, R)
        total = int(rng.integers(0, limits.sum() + 1))
        got = top_prefix(torch.from_numpy(values), torch.from_numpy(limits), total).tolist()
        assert got == top_prefix_reference(values, limits.tolist(), total)
        assert sum(got) == total
