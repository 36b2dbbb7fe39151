"""The CPU random stream against Triton's own, which the interpreter runs."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numba import njit

from forespark.serving.cpu import philox, simd


@njit
def _first_word(seed, offset):
    return philox.philox(seed, offset)[0]


@njit
def _gumbel(key, token):
    return philox.gumbel32(key, token)


@triton.jit
def _rand_kernel(out_ptr, bits_ptr, seed_ptr, offset_ptr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    seed = tl.load(seed_ptr)
    offsets = tl.load(offset_ptr + lanes)
    tl.store(out_ptr + lanes, tl.rand(seed, offsets))
    tl.store(bits_ptr + lanes, tl.randint(seed, offsets).to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32 + 5, 2**62 + 12345, -7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_stream_is_tritons_bit_for_bit(seed, dtype):
    # Offsets past 2**32 and negative ones catch a lost high word or a wrong shift.
    values = [0, 1, 2, 1023, 49_151, 2**30, 2**31 - 1, -1]
    if dtype is torch.int64:
        values[-3:] = [2**32, 2**40 + 3, 2**30 + 77]
    offsets = torch.tensor(values, dtype=dtype)
    drawn = torch.empty(8)
    bits = torch.empty(8, dtype=torch.int64)
    _rand_kernel[(1,)](drawn, bits, torch.tensor([seed]), offsets, N=8)
    # A 32-bit offset has no high word, so a negative one is its own bit pattern.
    wide = [v & 0xFFFFFFFF if dtype is torch.int32 else v for v in values]
    assert [float(philox.uniform(seed, v)) for v in wide] == drawn.tolist()
    assert [int(_first_word(seed, v)) for v in wide] == [b & 0xFFFFFFFF for b in bits.tolist()]


def test_noise_is_gumbel():
    """Mean 0.5772 and variance 1.6449 at 2**17 draws; standard errors 0.0035 and 0.015."""
    out = np.empty(1 << 17, np.float32)
    philox.add_gumbel(philox.gumbel_key(5, 9, False), np.zeros_like(out), 0, 1.0, out)
    assert abs(out.mean() - 0.5772) < 0.015
    assert abs(out.var() - 1.6449) < 0.06
    assert np.isfinite(out).all()


def test_draft_and_target_noise_differ():
    assert philox.gumbel_key(5, 9, True) != philox.gumbel_key(5, 9, False)


def test_block_and_scalar_noise_agree():
    key = philox.gumbel_key(3, 4, True)
    out = np.empty(40, np.float32)
    philox.add_gumbel(key, np.zeros(40, np.float32), 1000, 1.0, out)
    expected = [_gumbel(key, 1000 + i) for i in range(40)]
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_exponential_and_logarithms():
    x = np.concatenate([np.linspace(-100, 90, 4001), [-np.inf, np.inf, np.nan]]).astype(np.float32)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64)).astype(np.float32)
    exact[x < -86.5] = 0.0  # flushed, see exp32
    got = np.array([simd.exp32(v) for v in x], np.float32)
    np.testing.assert_allclose(got, exact, rtol=3e-7)

    positive = np.logspace(-30, 30, 2001).astype(np.float32)
    got = np.array([simd.log32(v) for v in positive])
    np.testing.assert_allclose(got, np.log(positive.astype(np.float64)), rtol=3e-7, atol=1e-7)

    small = -np.logspace(-10, -1e-4, 2001).astype(np.float32)
    got = np.array([simd.log1p32(v) for v in small])
    np.testing.assert_allclose(got, np.log1p(small.astype(np.float64)), rtol=5e-7)
