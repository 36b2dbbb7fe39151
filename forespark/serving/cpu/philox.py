"""Triton's random numbers on the CPU: Philox 4x32-10, ``tl.rand`` and Gumbel noise.

Every draw vLLM makes is a pure function of (seed, position, token). A twin that reproduces
the integer stream bit for bit samples the token the kernel would sample, so a seeded
request gives the same text with a kernel and with its twin. Only the logarithms of the
noise differ, in the last float32 bits.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, in the
counter layout of ``triton.language.random``: key = the seed's two halves, counter = (the
offset's two halves, 0, 0).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forespark.serving.cpu.simd import log1p32, log32

# tl.rand maps 31 random bits to [0, 1) with this scale, also its smallest value above 0.
UNIFORM_SCALE = np.float32(4.6566127342e-10)
# What vLLM adds to the position when a drafter draws, so that the proposal and the residual
# it is resampled from never share noise (sample/gumbel.py).
DRAFT_NOISE_SALT = 1 << 30

_U32 = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_KEY_A = np.uint64(0x9E3779B9)
_KEY_B = np.uint64(0xBB67AE85)
_ROUND_A = np.uint64(0xD2511F53)
_ROUND_B = np.uint64(0xCD9E8D57)


@njit(cache=True, inline="always")
def philox(seed, offset):
    """Two random 32-bit words of a 64-bit seed and a 64-bit offset, each as uint64.

    Words live in uint64 so that 32 x 32 bit products are exact.
    """
    key0 = np.uint64(seed) & _U32
    key1 = np.uint64(seed) >> _SHIFT
    c0 = np.uint64(offset) & _U32
    c1 = np.uint64(offset) >> _SHIFT
    c2 = np.uint64(0)
    c3 = np.uint64(0)
    for _ in range(10):
        product_a = _ROUND_A * c0
        product_b = _ROUND_B * c2
        c0 = (product_b >> _SHIFT) ^ c1 ^ key0
        c2 = (product_a >> _SHIFT) ^ c3 ^ key1
        c1 = product_b & _U32
        c3 = product_a & _U32
        key0 = (key0 + _KEY_A) & _U32
        key1 = (key1 + _KEY_B) & _U32
    return c0, c1


@njit(cache=True, inline="always")
def rand32(seed, offset):
    """float32 in [0, 1): ``tl.rand(seed, offset)``, bit for bit."""
    word, _ = philox(seed, offset)
    bits = np.int32(np.uint32(word))
    folded = ~bits if bits < 0 else bits
    return np.float32(folded) * UNIFORM_SCALE


@njit(cache=True)
def uniform(seed, offset):
    """``rand32`` as a function that plain Python can call."""
    return rand32(seed, offset)


@njit(cache=True, inline="always")
def noise32(draw):
    """Standard Gumbel noise from a draw in [0, 1), float32.

    ``-log(-log1p(-u))`` and not ``-log(-log(u))``: the winning tail is then at u near 0,
    where float32 resolves it. A draw of 0 becomes the smallest one above it.
    """
    clamped = UNIFORM_SCALE if draw < UNIFORM_SCALE else draw
    return -log32(-log1p32(-clamped))


@njit(cache=True, inline="always")
def gumbel32(seed, offset):
    """float32 Gumbel noise of one token: ``seed`` from ``gumbel_key``, offset = token id."""
    return noise32(rand32(seed, offset))


@njit(cache=True, inline="always")
def gumbel64(seed, offset):
    """float64 Gumbel noise from 64 random bits: -log(-log(u))."""
    low, high = philox(seed, offset)
    draw = np.float64((high << _SHIFT) | low) * 5.421010862427522170037e-20
    return -np.log(-np.log(max(draw, 2.2250738585072014e-308)))


@njit(cache=True)
def gumbel_key(seed, position, drafting):
    """Seed of one sampled token's noise vector, the same for the whole vocabulary.

    Args:
        seed: the request's seed, int64.
        position: the position before the sampled token.
        drafting: whether a drafter draws; its stream is disjoint from the target's.
    """
    salted = np.int64(position) + (DRAFT_NOISE_SALT if drafting else 0)
    word, _ = philox(seed, salted)
    return np.int64(word)


@njit(cache=True)
def add_gumbel(
    key,  # from gumbel_key
    logits,  # [V] float32
    first_token,  # token id of logits[0]
    temperature,  # divides the logits first; 1.0 leaves them as they are
    out,  # [V] float32: logits / temperature + noise; not the array ``logits``
):
    """Write noisy logits, whose argmax is a sample from softmax(logits / temperature)."""
    scale = np.float32(temperature)
    # Two loops: the random words are 64-bit lanes, the logarithms 32-bit ones, and LLVM
    # vectorises each at its own width but not both in one loop.
    for i in range(logits.shape[0]):
        out[i] = rand32(key, first_token + i)
    for i in range(logits.shape[0]):
        out[i] = logits[i] / scale + noise32(out[i])


@njit(cache=True)
def add_gumbel64(key, logits, first_token, temperature, out):
    """``add_gumbel`` with float64 noise and output, for vLLM's fp64 sampling option."""
    scale = np.float32(temperature)
    for i in range(logits.shape[0]):
        out[i] = np.float64(logits[i] / scale) + gumbel64(key, first_token + i)
