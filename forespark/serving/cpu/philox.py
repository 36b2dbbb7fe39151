"""Counter-based random numbers (Philox 4x32, ten rounds) as Triton's ``tl.rand`` draws them.

The CPU twins must draw what the kernels draw for the same (seed, position, token), so that
a seeded request gives the same text with a kernel and with its twin. Source: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numba as nb
import numpy as np

# tl.rand maps 31 random bits to [0, 1) with this float32 scale.
UNIFORM_SCALE = np.float32(4.6566127342e-10)
# Offset that vLLM adds to the position when a drafter draws (gumbel.py).
DRAFT_NOISE_SALT = 1 << 30

_U32 = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUND_A = np.uint64(0xD2511F53)
_ROUND_B = np.uint64(0xCD9E8D57)
_KEY_A = np.uint64(0x9E3779B9)
_KEY_B = np.uint64(0xBB67AE85)


@nb.njit(cache=True, inline="always")
def philox(seed, offset):
    """Two 32-bit words (low counter words) for a 64-bit seed and a 64-bit offset, as uint64."""
    key0 = np.uint64(seed) & _U32
    key1 = np.uint64(seed) >> _SHIFT
    c0 = np.uint64(offset) & _U32
    c1 = np.uint64(offset) >> _SHIFT
    c2 = np.uint64(0)
    c3 = np.uint64(0)
    for _ in range(10):
        product_b = _ROUND_B * c2
        product_a = _ROUND_A * c0
        c0 = (product_b >> _SHIFT) ^ c1 ^ key0
        c2 = (product_a >> _SHIFT) ^ c3 ^ key1
        c1 = product_b & _U32
        c3 = product_a & _U32
        key0 = (key0 + _KEY_A) & _U32
        key1 = (key1 + _KEY_B) & _U32
    return c0, c1


@nb.njit(cache=True, inline="always")
def rand32(seed, offset):
    """float32 in [0, 1): ``tl.rand(seed, offset)``."""
    word, _ = philox(seed, offset)
    bits = np.int32(np.uint32(word))
    if bits < 0:
        bits = np.int32(-bits - 1)
    return np.float32(bits) * UNIFORM_SCALE


@nb.njit(cache=True, inline="always")
def gumbel32(seed, offset):
    """float32 Gumbel noise with a resolved winning tail: -log(-log1p(-u))."""
    u = max(rand32(seed, offset), UNIFORM_SCALE)
    return -np.log(-np.log1p(-u))


@nb.njit(cache=True, inline="always")
def gumbel64(seed, offset):
    """float64 Gumbel noise from 64 random bits: -log(-log(u))."""
    low, high = philox(seed, offset)
    u = np.float64((high << _SHIFT) | low) * 5.421010862427522170037e-20
    u = max(u, 2.2250738585072014e-308)
    return -np.log(-np.log(u))
