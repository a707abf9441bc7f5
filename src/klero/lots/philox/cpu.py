"""Philox4x32-10 for Numba: one counter in, four words out. Agreement with the reference: *bits*."""

from __future__ import annotations

import numpy as np

from klero.device import inline
from klero.lots.philox import reference

U32, U64 = np.uint32, np.uint64
M0, M1 = U64(reference.M0), U64(reference.M1)
K0_1, K0_2, K0_3, K0_4, K0_5, K0_6, K0_7, K0_8, K0_9 = (U32(i * reference.W0 & reference.MASK) for i in range(1, 10))
K1_1, K1_2, K1_3, K1_4, K1_5, K1_6, K1_7, K1_8, K1_9 = (U32(i * reference.W1 & reference.MASK) for i in range(1, 10))
SHIFT = U64(32)


@inline
def one_round(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """One round; the caller moves the key."""
    product0, product1 = U64(c0) * M0, U64(c2) * M1
    high0, high1 = U32(product0 >> SHIFT), U32(product1 >> SHIFT)
    return U32(high1 ^ c1 ^ k0), U32(product1), U32(high0 ^ c3 ^ k1), U32(product0)


@inline
def philox4x32(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """The four words of one counter. The rounds stand one by one: loops over counters then vectorise."""
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_1), U32(k1 + K1_1))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_2), U32(k1 + K1_2))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_3), U32(k1 + K1_3))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_4), U32(k1 + K1_4))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_5), U32(k1 + K1_5))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_6), U32(k1 + K1_6))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_7), U32(k1 + K1_7))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_8), U32(k1 + K1_8))
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, U32(k0 + K0_9), U32(k1 + K1_9))
    return c0, c1, c2, c3


@inline
def word_of_id(
    token_id: int, position: np.uint32, child: np.uint32, purpose: np.uint32, k0: np.uint32, k1: np.uint32
) -> np.uint32:
    """The word of one token id."""
    a, b, c, d = philox4x32(U32(token_id >> 2), position, child, purpose, k0, k1)
    lane = token_id & 3
    return (a if lane == 0 else b) if lane < 2 else (c if lane == 2 else d)
