"""Triton kernels against their plain twins: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch

from forespark.fore_d.envelope import scores_from_logits
from forespark.fore_d.kernels import MAX_REQUESTS, scores_kernel, top_prefix_kernel
from forespark.fore_d.split import top_prefix
from forespark.fore_d.survival import entries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits(R: int, K: int, form: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    T = entries(K, form)
    z = 2 * torch.randn(R, T, generator=rng)
    scale = 0.5 + torch.rand(T, generator=rng)
    bias = torch.randn(T, generator=rng)
    return tuple(part.to(DEVICE) for part in (z, scale, bias))


@pytest.mark.parametrize("form", ["triangle", "row"])
@pytest.mark.parametrize("K", [1, 2, 7, 8, 15])
@pytest.mark.parametrize("R", [0, 1, 5])
def test_scores_equal_the_twins(R, K, form):
    z, scale, bias = logits(R, K, form)
    g, bad = scores_kernel(z, scale, bias, K, form)
    want, want_bad = scores_from_logits(z, scale, bias, K, form)
    # 15 float32 products and one division on both sides; a wrong offset errs by > 1e-2.
    torch.testing.assert_close(g, want, atol=2e-6, rtol=2e-5)
    assert bad.tolist() == want_bad.tolist() == [False] * R
    assert (g.diff(dim=1) <= 0).all() and (g >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_rows_inside_a_larger_buffer(dtype):
    z, scale, bias = logits(6, 7, "triangle")
    wide = torch.zeros(6, 64, dtype=dtype, device=DEVICE)
    wide[:, :28] = z
    g, _ = scores_kernel(wide[:, :28], scale, bias, 7)
    want, _ = scores_from_logits(wide[:, :28], scale, bias, 7)
    torch.testing.assert_close(g, want, atol=2e-6, rtol=2e-5)


def test_scores_of_unusual_logits():
    z, scale, bias = logits(5, 4, "triangle")
    scale.fill_(1.0)
    z[0, 3] = float("nan")
    z[1].fill_(float("inf"))
    z[2].fill_(float("-inf"))
    z[3].fill_(-900.0)
    g, bad = scores_kernel(z, scale, bias, 4)
    want, want_bad = scores_from_logits(z, scale, bias, 4)
    assert bad.tolist() == want_bad.tolist() == [True, False, False, False, False]
    torch.testing.assert_close(g, want, atol=2e-6, rtol=2e-5)
    assert g[0].tolist() == [0] * 4 and g[1].tolist() == [1] * 4 and g[2].tolist() == [0] * 4


def test_positions_of_one_hull_segment_tie_exactly():
    """A longer draft with a better first position: one segment, whose scores are equal."""
    z = torch.tensor([[-1.0, 2.0, 2.0]], device=DEVICE)
    one, zero = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    g, _ = scores_kernel(z, one, zero, 2)
    assert g[0, 0] == g[0, 1] > 0


def share(values: torch.Tensor, limits: torch.Tensor, total: int) -> list[int]:
    on_device = torch.tensor([total], device=DEVICE)
    return top_prefix_kernel(values.to(DEVICE), limits.to(DEVICE), on_device).tolist()


@pytest.mark.parametrize("K", [1, 7, 15])
@pytest.mark.parametrize("R", [1, 2, 3, 63, 64, 65])
def test_shares_equal_the_twins(R, K):
    rng = torch.Generator().manual_seed(R * K)
    values = torch.rand(R, K, generator=rng).cumprod(dim=1)
    limits = torch.randint(0, K + 1, (R,), generator=rng)
    most = int(limits.sum())
    for total in {0, 1, most // 3, most - 1, most, most + 5}:
        if total >= 0:
            want = top_prefix(values, limits, total).tolist()
            assert share(values, limits, total) == want
            assert sum(want) == min(total, most)


def test_shares_of_ties_nan_zero_infinite_and_rising_rows():
    nan, inf = float("nan"), float("inf")
    values = torch.tensor(
        [
            [0.5, 0.5, 0.5, 0.5],
            [nan, 0.9, 0.9, 0.1],
            [0.5, 0.6, 0.5, 0.0],
            [inf, 1.0, -1.0, 0.3],
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    limits = torch.tensor([4, 4, 3, 4, 2])
    for total in range(18):
        assert share(values, limits, total) == top_prefix(values, limits, total).tolist(), total


def test_shares_of_a_large_tied_batch_keep_the_rule():
    values, limits = torch.full((300, 15), 0.25), torch.full((300,), 15)
    assert share(values, limits, 300 * 7 + 11) == [8] * 11 + [7] * 289


def test_a_smaller_batch_after_a_larger_one_sees_nothing_of_it():
    values = torch.rand(40, 7, generator=torch.Generator().manual_seed(1)).cumprod(dim=1)
    limits = torch.full((40,), 7)
    share(values, limits, 100)
    assert share(values[:3], limits[:3], 9) == top_prefix(values[:3], limits[:3], 9).tolist()


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="want \\[R, 28\\]"):
        scores_kernel(torch.zeros(2, 27), torch.zeros(28), torch.zeros(28), 7)
    with pytest.raises(ValueError, match="R <="):
        top_prefix_kernel(
            torch.zeros(MAX_REQUESTS + 1, 1), torch.zeros(MAX_REQUESTS + 1), torch.zeros(1)
        )
