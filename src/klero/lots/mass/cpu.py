"""Keys, weights and masses for Numba. Agreement with the reference: *bits*.

Kernels order by *signed* keys, key = bits < 0 ? bits ^ 0x7fffffff : bits: the same order as the unsigned keys of
docs/draw.md (the two differ by the top bit), and the one that AVX2 compares without a detour.
"""

from __future__ import annotations

import numpy as np

from klero.device import inline
from klero.lots.mass.reference import TINY_BITS

I32, I64, U64, F32 = np.int32, np.int64, np.uint64, np.float32
TINY = I32(TINY_BITS)
MAGNITUDE = I32(0x7FFFFFFF)
TWO_20 = F32(2.0**20)
KEY_NEG_INF = I32(np.uint32(0x807FFFFF).view(np.int32))  # the key of -inf
KEY_POS_INF = I32(0x7F800000)


@inline
def flush(bits: np.int32) -> np.int32:
    """Bits of a logit with |l| < 2^-64 turned into +0."""
    return I32(0) if (bits & MAGNITUDE) < TINY else bits


@inline
def key_of_bits(bits: np.int32) -> np.int32:
    """Signed ordered key; its own inverse."""
    return I32(bits ^ ((bits >> I32(31)) & MAGNITUDE))


@inline
def mass_of_weight(w: np.float32) -> np.uint64:
    """floor(w * 2^40) in two exact steps of 20 bits, which vectorise where a 64-bit conversion does not."""
    high = I32(w * TWO_20)
    low = I32((w * TWO_20 - F32(high)) * TWO_20)
    return (U64(high) << U64(20)) + U64(low)
