"""exp32, log32 and core in NumPy: the definition. NumPy rounds every operation on its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.lots.pinned.constants import (
    EXP_MIN,
    EXP_POLY,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_POLY,
    ROUND_MAGIC,
    SQRT_HALF,
    f32,
)

F32 = npt.NDArray[np.float32]


def horner(x: F32, coefficients: tuple[np.float32, ...]) -> F32:
    """Evaluate a polynomial, highest power first, each product and sum rounded."""
    p: F32 = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = p * x + c
    return p


def exp32(x: npt.ArrayLike) -> F32:
    """Return e^x for binary32 x <= 0; 0 below -87. Agreement with the kernels: *bits*."""
    x = np.asarray(x, dtype=np.float32)
    alive = x >= EXP_MIN
    x = np.where(alive, x, f32(0))
    n = (x * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    y = ((horner(r, EXP_POLY) * (r * r)) + r) + f32(1)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    result: F32 = np.where(alive, y * power, f32(0)).astype(np.float32, copy=False)
    return result


def core(f: F32, e: F32) -> F32:
    """Return ln(1 + f) + e * ln 2 for f in [sqrt(1/2) - 1, sqrt(2) - 1]."""
    y = (horner(f, LOG_POLY) * f) * (f * f)
    y = y + e * LN2_LOW
    y = y - (f * f) * f32(0.5)
    result: F32 = (f + y) + e * LN2_HIGH
    return result


def log32(x: npt.ArrayLike) -> F32:
    """Return ln x for normal binary32 x > 0. Agreement with the kernels: *bits*."""
    bits = np.asarray(x, dtype=np.float32).view(np.int32)
    e = (bits >> 23) - 126
    z = ((bits & 0x007FFFFF) | 0x3F000000).view(np.float32)  # in [0.5, 1)
    small = z < SQRT_HALF
    z = np.where(small, z + z, z)
    return core(z - f32(1), np.where(small, e - 1, e).astype(np.float32))
