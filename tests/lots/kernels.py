"""Loops over the scalar kernels, and the kept ids of a row as the kernels list them. Needs Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import I32, mass_of_weight
from klero.lots.noise import cpu as noise
from klero.lots.philox import cpu as philox
from klero.lots.pinned import cpu as pinned
from klero.params import ROW_DTYPE, RowParams
from klero.rows.maxima.cpu import block_maxima, flush_key
from klero.rows.room import carve, room_of
from klero.sampling.draw.cpu import lot_bound
from klero.sampling.filters.nucleus.cpu import UNLISTED
from klero.sampling.fused.cpu import keep_prefix, list_cut


@kernel
def exp32_all(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = pinned.exp32(x[i])


@kernel
def log32_all(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = pinned.log32(x[i])


@kernel
def lot_all(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = noise.lot_of_word(x[i])


@kernel
def bound_all(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = lot_bound(x[i])


@kernel
def mass_all(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = mass_of_weight(x[i])


@kernel
def philox_all(counters: Any, keys: Any, out: Any) -> None:
    for i in range(counters.shape[0]):
        c = counters[i]
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = philox.philox4x32(
            c[0], c[1], c[2], c[3], keys[i, 0], keys[i, 1]
        )


@kernel
def words_all(ids: Any, position: Any, child: Any, purpose: Any, k0: Any, k1: Any, out: Any) -> None:
    for i in range(ids.size):
        out[i] = philox.word_of_id(ids[i], position, child, purpose, k0, k1)


def exp32(x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    exp32_all(x, y)
    return y


def log32(x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    log32_all(x, y)
    return y


def lot_of_word(x: np.ndarray) -> np.ndarray:
    y = np.empty(x.shape, np.float32)
    lot_all(x, y)
    return y


def bound_of_word(x: np.ndarray) -> np.ndarray:
    y = np.empty(x.shape, np.float32)
    bound_all(x, y)
    return y


def masses(w: np.ndarray) -> np.ndarray:
    q = np.empty(w.shape, np.uint64)
    mass_all(w, q)
    return q


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """counters: uint32 [N, 4]; keys: uint32 [N, 2]."""
    out = np.empty(counters.shape, np.uint32)
    philox_all(counters, keys, out)
    return out


def words_of_ids(ids: np.ndarray, seed: int, position: int, child: int, purpose: int) -> np.ndarray:
    out = np.empty(ids.shape, np.uint32)
    numbers = (np.uint32(i) for i in (position, child, purpose, seed & 0xFFFFFFFF, seed >> 32))
    words_all(ids.astype(np.int64), *numbers, out)
    return out


def lots_of_ids(ids: Any, seed: int, position: int, child: int, purpose: int) -> np.ndarray:
    return lot_of_word(words_of_ids(np.asarray(ids), seed, position, child, purpose))


def uniform(seed: int, position: int, child: int, purpose: int) -> np.float32:
    return np.float32(noise.unit(words_of_ids(np.array([0]), seed, position, child, purpose)[0]))


def kept(row: np.ndarray, params: RowParams) -> np.ndarray:
    """The ids that the kernels let draw, in their own order, before XTC.

    row: float32 [V] that can be drawn; params: not greedy.
    """
    p, bits = np.array([params], ROW_DTYPE)[0], row.view(np.int32)
    (maxima, keys, ids, spare, weights, _), _ = carve(room_of(row.size), row.size)
    highest, widest = block_maxima(bits, maxima)
    top = I32(flush_key(highest))
    n, key, last, num_kept = keep_prefix(bits, maxima, top, widest, p, keys, ids, spare, weights)
    if n == UNLISTED:
        n = list_cut(bits, maxima, np.int32(key), last, keys, ids)
    assert n == num_kept
    return ids[:n].copy()
