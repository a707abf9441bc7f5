"""Filters for Numba: find the cut without sorting the row. Agreement: *set*."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import I32, I64, KEY_NEG_INF, U64
from klero.lots.pinned.cpu import exp32
from klero.rows.select.cpu import (
    ONE,
    fill_masses,
    keep_above,
    logit_of_key,
    mass_of_key,
    select,
)

LOW_32 = U64(2**32 - 1)


@kernel
def min_p_key(top: np.int32, maximum: np.float32, reciprocal: np.float32, min_p: np.float32) -> np.int32:
    """The smallest key whose weight is at least min_p: bisection, as exp32 and the keys are monotone."""
    low, high = I64(KEY_NEG_INF), I64(top)  # low fails, high holds (its weight is 1)
    while high - low > 1:
        middle = (low + high) >> 1
        w = exp32((logit_of_key(I32(middle)) - maximum) * reciprocal)
        if w >= min_p:
            high = middle
        else:
            low = middle
    return I32(high)


@kernel
def needed_mass(mass: np.uint64, top_p: np.uint64) -> np.uint64:
    """max(1, ceil(P * Q / 2^32)) in unsigned 64-bit."""
    need = top_p * (mass >> U64(32)) + ((top_p * (mass & LOW_32) + LOW_32) >> U64(32))
    return max(need, ONE)


@kernel
def keep_nucleus(
    keys: Any, ids: Any, n: int, need: np.uint64,
    maximum: np.float32, reciprocal: np.float32, spare_keys: Any, weights: Any,
) -> int:  # fmt: skip
    """Cut the candidates to the shortest prefix whose mass reaches `need`. weights: their masses, overwritten."""
    for i in range(n):
        spare_keys[i] = keys[i]
    threshold, above = select(spare_keys, weights, n, need)
    q = mass_of_key(threshold, maximum, reciprocal)  # > 0, or it could not be the one that reaches `need`
    ties = I64((need - above + q - ONE) // q)
    return int(keep_above(keys, ids, n, threshold, ties))


@kernel
def drop_top_choices(
    keys: Any, ids: Any, n: int, top: np.int32, reciprocal: np.float32, threshold: np.uint64, weights: Any
) -> tuple[int, np.int32]:
    """Remove, of the listed tokens that reach the threshold, all but the last; return (how many are left, top key).

    In the total order the last of them has the least key, and of equal keys the highest id. One alone stays.
    """
    need = needed_mass(fill_masses(keys, n, logit_of_key(top), reciprocal, weights), threshold)
    last, least = -1, top
    for i in range(n):
        if weights[i] >= need and keys[i] <= least:
            last, least = i, keys[i]
    if last < 0:
        return n, top
    left = 0
    for i in range(n):
        key, keep = keys[i], weights[i] < need or i == last
        keys[left], ids[left] = key, ids[i]
        left += keep
    return left, least
