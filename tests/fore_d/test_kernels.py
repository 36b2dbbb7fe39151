"""Triton kernels against their plain twins: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch

from forespark.fore_d.envelope import scores_from_logits
from forespark.fore_d.kernels import (
    MAX_REQUESTS,
    post_survival_kernel,
    scores_kernel,
    top_prefix_kernel,
)
from forespark.fore_d.split import top_prefix, top_prefix_reference
from forespark.fore_d.survival import entries, post_survival

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits(R: int, K: int, form: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    T = entries(K, form)
    z = 2 * torch.randn(R, T, generator=rng)
    scale = 0.5 + torch.rand(T, generator=rng)
    bias = torch.randn(T, generator=rng)
    return tuple(part.to(DEVICE) for part in (z, scale, bias))


def plain(*arguments):
    """The plain form's scores: of CPU tensors, since on a GPU it would call the kernel."""
    return scores_from_logits(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    # 15 float32 products and one division on both sides; a wrong offset errs by > 1e-2.
    torch.testing.assert_close(got.cpu(), want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("form", ["triangle", "row"])
@pytest.mark.parametrize("K", [1, 2, 7, 8, 15])
@pytest.mark.parametrize("R", [0, 1, 3])
def test_scores_equal_the_twins(R, K, form):
    z, scale, bias = logits(R, K, form)
    g, bad = scores_kernel(z, scale, bias, K, form)
    want, want_bad = plain(z, scale, bias, K, form)
    close(g, want)
    assert bad.tolist() == want_bad.tolist() == [False] * R
    assert (g.diff(dim=1) <= 0).all() and (g >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_rows_inside_a_larger_buffer(dtype):
    z, scale, bias = logits(6, 7, "triangle")
    wide = torch.zeros(6, 64, dtype=dtype, device=DEVICE)
    wide[:, :28] = z
    g, _ = scores_kernel(wide[:, :28], scale, bias, 7)
    want, _ = plain(wide[:, :28], scale, bias, 7)
    close(g, want)


def test_scores_of_unusual_logits():
    z, scale, bias = logits(5, 4, "triangle")
    scale.fill_(1.0)
    z[0, 3] = float("nan")
    z[1].fill_(float("inf"))
    z[2].fill_(float("-inf"))
    z[3].fill_(-900.0)
    g, bad = scores_kernel(z, scale, bias, 4)
    want, want_bad = plain(z, scale, bias, 4)
    assert bad.tolist() == want_bad.tolist() == [True, False, False, False, False]
    close(g, want)
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


@pytest.mark.parametrize("K", [1, 15])
@pytest.mark.parametrize("R", [1, 63, 64, 65])
def test_shares_equal_the_twins(R, K):
    rng = torch.Generator().manual_seed(R * K)
    values = torch.rand(R, K, generator=rng).cumprod(dim=1)
    limits = torch.randint(0, K + 1, (R,), generator=rng)
    most = int(limits.sum())
    for total in {most // 3, most - 1, most + 5}:
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
            [inf, 1.0, -inf, 0.3],
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    limits = torch.tensor([4, 4, 3, 4, 2])
    for total in (1, 3, 6, 11, 13, 17):
        assert share(values, limits, total) == top_prefix(values, limits, total).tolist(), total


def test_shares_of_a_large_tied_batch_keep_the_rule():
    values, limits = torch.full((300, 15), 0.25), torch.full((300,), 15)
    assert share(values, limits, 300 * 7 + 11) == [8] * 11 + [7] * 289


@pytest.mark.parametrize("K", [31, 63])
def test_shares_of_long_drafts(K):
    """Around powers of two, where the bisection over positions gains a step."""
    rng = torch.Generator().manual_seed(K)
    # Few distinct values, so that ties span positions and requests.
    values = torch.randint(0, 5, (6, K), generator=rng).sort(dim=1, descending=True).values / 4
    limits = torch.tensor([K, 0, K - 1, 1, K, K // 2])
    most = int(limits.sum())
    for total in {1, most // 2, most - K}:
        want = top_prefix_reference(values.numpy(), limits.tolist(), total)
        assert share(values, limits, total) == want, total


def test_shares_of_as_many_requests_as_one_program_holds():
    rng = torch.Generator().manual_seed(3)
    values = (torch.rand(2048, 15, generator=rng).cumprod(dim=1) * 64).round() / 64
    limits = torch.randint(0, 16, (2048,), generator=rng)
    assert share(values, limits, 9000) == top_prefix(values, limits, 9000).tolist()


def test_shares_of_zero_requests_zero_totals_and_no_room():
    assert share(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 0) == []
    values = torch.tensor([[float("inf"), 0.5], [0.5, 0.0]])
    assert share(values, torch.tensor([2, 2]), 0) == [0, 0]
    assert share(values, torch.tensor([0, 0]), 3) == [0, 0]
    assert share(values, torch.tensor([2, 1]), 99) == [2, 1]


def test_shares_of_rows_inside_a_larger_buffer():
    wide = torch.full((5, 12), 9.0)
    wide[:, :4] = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).cumprod(dim=1)
    limits = torch.full((5,), 4)
    part = wide.to(DEVICE)[:, :4]
    got = top_prefix_kernel(part, limits.to(DEVICE), torch.tensor([7], device=DEVICE))
    assert got.tolist() == top_prefix(wide[:, :4], limits, 7).tolist()


@pytest.mark.parametrize("K", [1, 15, 16])
@pytest.mark.parametrize("R", [0, 1, 16, 17])
def test_post_draft_survival_equals_the_twin(R, K):
    rng = torch.Generator().manual_seed(R + K)
    logits = 3 * torch.randn(R, K, generator=rng)
    theta = 0.5 + torch.rand(K, generator=rng)
    lengths = torch.randint(0, K + 1, (R,), generator=rng)
    got, bad = post_survival_kernel(*(x.to(DEVICE) for x in (logits, theta, lengths)))
    want, want_bad = post_survival(logits, theta, lengths)
    close(got, want)
    assert torch.equal(bad.cpu(), want_bad)


def test_post_draft_survival_of_unusual_logits():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[inf, 1.0, nan], [1.0, nan, 1.0], [-inf, inf, 0.0], [nan, nan, nan]])
    lengths = torch.tensor([2, 2, 3, 0])
    theta = torch.ones(3)
    got, bad = post_survival_kernel(*(x.to(DEVICE) for x in (logits, theta, lengths)))
    want, want_bad = post_survival(logits, theta, lengths)
    close(got, want)
    assert bad.tolist() == want_bad.tolist() == [False, True, False, False]


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
