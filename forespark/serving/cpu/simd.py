"""Float32 exponential and logarithm that LLVM can vectorise inside numba loops.

A call to libm's ``expf`` or ``logf`` keeps a loop scalar, 6 ns an element. The branch-free
polynomials here (Cephes' minimax coefficients, S. L. Moshier) let the same loop run at the
width of the vector unit. Relative error is at most 2e-7, two units in the last place, which
is what a GPU's own approximations are worth.

numba's on-disk cache watches only the file of the outermost function: after editing a
function that others inline or call (here, in philox.py or vocab.py), delete the
``__pycache__`` folder beside it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SQRT2 = np.float32(1.41421356)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
# Below the first, e**x (under 3e-38) is flushed to 0; above the second it is infinite.
_EXP_LOWEST = np.float32(-86.5)
_EXP_HIGHEST = np.float32(88.72283)

_E0 = np.float32(1.9875691500e-4)
_E1 = np.float32(1.3981999507e-3)
_E2 = np.float32(8.3334519073e-3)
_E3 = np.float32(4.1665795894e-2)
_E4 = np.float32(1.6666665459e-1)
_E5 = np.float32(5.0000001201e-1)

_L0 = np.float32(7.0376836292e-2)
_L1 = np.float32(-1.1514610310e-1)
_L2 = np.float32(1.1676998740e-1)
_L3 = np.float32(-1.2420140846e-1)
_L4 = np.float32(1.4249322787e-1)
_L5 = np.float32(-1.6668057665e-1)
_L6 = np.float32(2.0000714765e-1)
_L7 = np.float32(-2.4999993993e-1)
_L8 = np.float32(3.3333331174e-1)


@njit(inline="always")
def exp32(x):
    """e**x in float32: 0 below -86.5, NaN stays NaN, infinity above 88.72."""
    clamped = min(max(x, _EXP_LOWEST), _EXP_HIGHEST)
    n = np.floor(clamped * _LOG2E + _HALF)
    r = clamped - n * _LN2_HIGH - n * _LN2_LOW
    y = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    y = y * r * r + r + _ONE
    # 2**128 has no float32: scale by 2**(n-1) and double, which only matters near the top.
    scale = np.int32((np.int32(n) + np.int32(126)) << np.int32(23)).view(np.float32)
    y = y * scale * np.float32(2.0)
    y = np.float32(0.0) if x < _EXP_LOWEST else y
    y = np.float32(np.inf) if x > _EXP_HIGHEST else y
    return x if np.isnan(x) else y


@njit(inline="always")
def log32(x):
    """Natural logarithm in float32 of a positive, finite, normal number."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32((bits >> np.int32(23)) - np.int32(127))
    mantissa = np.int32((bits & np.int32(0x007FFFFF)) | np.int32(0x3F800000)).view(np.float32)
    upper = mantissa > _SQRT2
    mantissa = mantissa * _HALF if upper else mantissa
    e = np.float32(exponent + 1) if upper else np.float32(exponent)
    f = mantissa - _ONE
    z = f * f
    y = (((_L0 * f + _L1) * f + _L2) * f + _L3) * f + _L4
    y = (((y * f + _L5) * f + _L6) * f + _L7) * f + _L8
    y = y * f * z + e * _LN2_LOW - _HALF * z
    return f + y + e * _LN2_HIGH


@njit(inline="always")
def log1p32(x):
    """log(1 + x) in float32 for x in (-1, 1), exact for tiny x.

    ``1 + x`` loses low bits of x; the ratio x / ((1 + x) - 1) puts them back (Kahan).
    """
    w = _ONE + x
    lost = w - _ONE
    safe = _ONE if lost == np.float32(0.0) else lost
    return x if lost == np.float32(0.0) else log32(w) * (x / safe)
