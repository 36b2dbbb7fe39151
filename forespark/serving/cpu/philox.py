"""Triton's random numbers on the CPU: Philox 4x32-10, ``tl.rand`` and Gumbel noise.

Every draw vLLM makes is a pure function of (seed, position, token), so a twin that
reproduces the integer stream bit for bit samples the token the kernel would sample. Only
the logarithms of the noise differ, in the last float32 bits.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, in the
counter layout of ``triton.language.random``: key = the seed's two halves, counter = (the
offset's two halves, 0, 0).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forespark.serving.cpu.simd import log1p32, log32

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_KEY_A = np.uint64(0x9E3779B9)
_KEY_B = np.uint64(0xBB67AE85)
_ROUND_A = np.uint64(0xD2511F53)
_ROUND_B = np.uint64(0xCD9E8D57)
_ROUNDS = 10
_ZERO = np.uint64(0)

# What ``tl.rand`` multiplies 31 random bits by; also its smallest value above zero.
_UNIT = np.float32(4.6566127342e-10)
# vLLM keeps draft noise apart from target noise by this offset on the position.
DRAFT_NOISE_SALT = 1 << 30


@njit(inline="always")
def _philox(key_0, key_1, counter_0, counter_1):
    """First word of ten Philox rounds; 32-bit words held in uint64 so products are exact."""
    c0, c1, c2, c3 = counter_0, counter_1, _ZERO, _ZERO
    k0, k1 = key_0, key_1
    for _ in range(_ROUNDS):
        product_a = _ROUND_A * c0
        product_b = _ROUND_B * c2
        c0 = (product_b >> _SHIFT) ^ c1 ^ k0
        c2 = (product_a >> _SHIFT) ^ c3 ^ k1
        c1 = product_b & _MASK
        c3 = product_a & _MASK
        k0 = (k0 + _KEY_A) & _MASK
        k1 = (k1 + _KEY_B) & _MASK
    return c0


@njit(cache=True, inline="always")
def randint(seed, offset):
    """``tl.randint(seed, offset)`` for integer scalars: 32 random bits as uint64."""
    key = np.uint64(seed)
    counter = np.uint64(offset)
    return _philox(key & _MASK, key >> _SHIFT, counter & _MASK, counter >> _SHIFT)


@njit(inline="always")
def _to_uniform(bits):
    signed = np.int32(np.uint32(bits))
    folded = ~signed if signed < 0 else signed
    return np.float32(folded) * _UNIT


@njit(cache=True)
def uniform(seed, offset):
    """``tl.rand(seed, offset)`` for integer scalars: a float32 in [0, 1), bit for bit."""
    return _to_uniform(randint(seed, offset))


@njit(cache=True)
def uniform_above_zero(seed, offset):
    """``uniform`` with 0 replaced by the smallest value above it, as vLLM's ``tl_rand32``."""
    return max(_to_uniform(randint(seed, offset)), _UNIT)


@njit(cache=True)
def gumbel_key(seed, position, drafting):
    """Seed of one sampled token's noise vector: the same for all tokens of the vocabulary.

    Args:
        seed: the request's seed, int64.
        position: the position before the sampled token.
        drafting: draft noise (True) or target noise (False): never the same stream.
    """
    salted = np.int64(position) + (DRAFT_NOISE_SALT if drafting else 0)
    return np.int64(randint(seed, salted))


@njit(inline="always")
def _gumbel(key_0, token):
    uniform_draw = max(_to_uniform(_philox(key_0, _ZERO, np.uint64(token), _ZERO)), _UNIT)
    return -log32(-log1p32(-uniform_draw))


@njit(cache=True)
def gumbel(key, token):
    """Standard Gumbel noise of one token id under ``gumbel_key``'s key, float32."""
    return _gumbel(np.uint64(key), token)


@njit(cache=True)
def add_gumbel(
    key,
    logits,  # [V] float32 view, any dtype numba can cast
    first_token,  # token id of logits[0]
    temperature,  # divides the logits first; 1.0 leaves them as they are
    out,  # [V] float32: logits / temperature + noise
):
    """Write noisy logits, whose argmax is a sample from softmax(logits / temperature)."""
    key_0 = np.uint64(key)
    scale = np.float32(temperature)
    for i in range(logits.shape[0]):
        out[i] = np.float32(logits[i]) / scale + _gumbel(key_0, np.uint64(first_token + i))
