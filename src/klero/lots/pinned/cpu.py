"""exp32, log32 and core for Numba: scalar functions that kernels inline. Agreement with the reference: *bits*."""

from __future__ import annotations

import numpy as np

from klero.device import inline
from klero.lots.pinned.constants import (
    EXP_MIN,
    EXP_POLY,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_POLY,
    ROUND_MAGIC,
    SQRT_HALF,
)

E0, E1, E2, E3, E4, E5 = EXP_POLY
L0, L1, L2, L3, L4, L5, L6, L7, L8 = LOG_POLY
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
I32 = np.int32


@inline
def exp32(x: np.float32) -> np.float32:
    """e^x for x <= 0 or -inf; 0 below -87. Branch-free, so that loops over it vectorise."""
    clamped = x if x > EXP_MIN else EXP_MIN  # keeps the conversion to int defined for -inf
    n = (clamped * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC
    r = clamped - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    y = ((p * (r * r)) + r) + ONE
    power = I32((I32(n) + I32(127)) << I32(23)).view(np.float32)
    return y * power if x >= EXP_MIN else ZERO


@inline
def core(f: np.float32, e: np.float32) -> np.float32:
    """ln(1 + f) + e * ln 2."""
    p = (((((((L0 * f + L1) * f + L2) * f + L3) * f + L4) * f + L5) * f + L6) * f + L7) * f + L8
    y = (p * f) * (f * f)
    y = y + e * LN2_LOW
    y = y - (f * f) * HALF
    return (f + y) + e * LN2_HIGH


@inline
def log32(x: np.float32) -> np.float32:
    """ln x for normal x > 0."""
    bits = np.float32(x).view(np.int32)
    e = I32((bits >> I32(23)) - I32(126))
    z = I32((bits & I32(0x007FFFFF)) | I32(0x3F000000)).view(np.float32)
    if z < SQRT_HALF:
        e = I32(e - I32(1))
        z = z + z
    return core(z - ONE, np.float32(e))
