"""Lots for Numba. Agreement with the reference: *bits*."""

from __future__ import annotations

import numpy as np

from klero.device import inline, kernel
from klero.lots.noise.reference import CORE_BELOW, TWO_M32
from klero.lots.pinned.cpu import HALF, ONE, ZERO, core, log32

U32, F32 = np.uint32, np.float32
MIDDLE = U32(2**31)
MINUS_ONE = F32(-1)


@inline
def unit(x: np.uint32) -> np.float32:
    """(float(x) + 0.5) * 2^-32."""
    return (F32(x) + HALF) * TWO_M32


@kernel
def lot_of_word(x: np.uint32) -> np.float32:
    """The lot of one word."""
    if x >= MIDDLE:
        inner = log32(unit(U32(~x)))
    else:
        v = unit(x)
        inner = core(-v, ZERO) if v < CORE_BELOW else core(ONE - (v + v), MINUS_ONE)
    return -log32(-inner)
