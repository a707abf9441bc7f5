"""Lots in NumPy: the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.lots.philox.reference import words_of_ids
from klero.lots.pinned.constants import f32
from klero.lots.pinned.reference import core, log32

DRAW, ACCEPT, RESIDUAL, DRAFT, COIN = range(5)
"""Purposes: the last word of the counter."""

TWO_M32 = f32(2.0**-32)
CORE_BELOW = f32(0.29289322)  # 1 - sqrt(1/2): above it 1 - v leaves core's range

F32 = npt.NDArray[np.float32]


def unit(x: npt.NDArray[np.uint32]) -> F32:
    """(float(x) + 0.5) * 2^-32 in binary32."""
    return (x.astype(np.float32) + f32(0.5)) * TWO_M32


def lot_of_word(x: npt.ArrayLike) -> F32:
    """Return the lot of each word. x: uint32 [...]; result: float32 of the same shape."""
    x = np.asarray(x, dtype=np.uint32)
    upper = x >= np.uint32(2**31)
    v = unit(np.where(upper, ~x, x))
    small = v < CORE_BELOW
    zero, minus_one = np.zeros_like(v), np.full_like(v, -1)
    lower = np.where(small, core(np.where(small, -v, 0), zero), core(f32(1) - (v + v), minus_one))
    return -log32(-np.where(upper, log32(v), lower))


def lots_of_ids(token_ids: npt.ArrayLike, seed: int, position: int, child: int, purpose: int = DRAW) -> F32:
    """Return the lot of each token id. token_ids: int [N]; result: float32 [N]."""
    return lot_of_word(words_of_ids(token_ids, seed, position, child, purpose))


def uniform(seed: int, position: int, child: int, purpose: int) -> np.float32:
    """Return the single number of a purpose (accept, coin), in (0, 1]."""
    return f32(unit(words_of_ids([0], seed, position, child, purpose))[0])
