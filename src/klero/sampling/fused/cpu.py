"""The fused pass for Numba: block maxima first, then only what the row's parameters ask for."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import folded, kernel
from klero.lots.mass.cpu import I32, KEY_NEG_INF, U64, key_of_bits
from klero.lots.noise.cpu import U32, unit
from klero.lots.noise.reference import COIN
from klero.lots.philox.cpu import word_of_id
from klero.rows.maxima.cpu import block_maxima, lowest_id
from klero.rows.room import carve
from klero.rows.select.cpu import ALL_ALIVE, fill_masses, gather, keep_top_k, logit_of_key, num_from, top_k_bound
from klero.rows.view.cpu import BLOCK, as_row, flush_key, is_bad, num_alive, width_of
from klero.sampling.draw.cpu import draw_kept, draw_row
from klero.sampling.filters.cpu import drop_top_choices, keep_nucleus, min_p_key, needed_mass
from klero.sampling.filters.nucleus.cpu import UNLISTED, keep_top_p
from klero.sampling.filters.thresholds.cpu import least_kept
from klero.sampling.filters.typical.cpu import keep_typical
from klero.sampling.status import BAD, EMPTY, NO_TOKEN, OK

TOP_P_OFF = TYPICAL_P_OFF = U64(2**32)
ZERO = np.float32(0)
FEW_BLOCKS = 64
PURPOSE_COIN = U32(COIN)


@kernel
def are_many(maxima: Any, least: np.int32) -> bool:
    """Whether so many blocks reach a key that a tighter one is worth looking for."""
    count = 0
    for b in range(maxima.size):
        count += maxima[b] >= least
    return count > FEW_BLOCKS


@kernel
def keep_listed(
    row: Any, maxima: Any, top: np.int32, least: np.int32, p: Any, keys: Any, ids: Any, spare: Any, weights: Any
) -> int:
    """Of the tokens from the key `least` on, top-k, then top-p among what it left: gather and cut; return how many."""
    maximum = logit_of_key(top)
    threshold = least
    if p.top_k < width_of(row) and (least == ALL_ALIVE or are_many(maxima, least)):
        threshold = max(threshold, top_k_bound(row, maxima, p.top_k, spare, weights))
    n = gather(row, maxima, threshold, keys, ids)
    if n > p.top_k:
        n = keep_top_k(keys, ids, n, p.top_k, spare, weights)
    if p.top_p < TOP_P_OFF:
        need = needed_mass(fill_masses(keys, n, maximum, p.reciprocal, weights), p.top_p)
        n = keep_nucleus(keys, ids, n, need, maximum, p.reciprocal, spare, weights)
    return int(n)


@folded
def keep_prefix(
    row: Any, maxima: Any, top: np.int32, widest: np.uint32, p: Any, keys: Any, ids: Any, spare: Any, weights: Any
) -> tuple[int, np.int32, int, int]:
    """The cut of the filters before XTC: (n, key, last, kept) as in filters/nucleus."""
    least = ALL_ALIVE
    if p.top_n_sigma > ZERO or p.epsilon > U64(0) or p.eta > ZERO or p.top_a > U64(0):
        least = least_kept(row, maxima, top, widest, p)
    if least > top:
        keys[0], ids[0] = top, lowest_id(row, maxima, top)
        return 1, top, -1, 1
    if p.min_p > ZERO:
        least = max(least, min_p_key(top, logit_of_key(top), p.reciprocal, p.min_p))
    if p.top_k >= width_of(row):
        if least == ALL_ALIVE and p.top_p < TOP_P_OFF:
            return keep_top_p(row, maxima, top, p.top_p, p.reciprocal, keys, ids, spare, weights)
        if least == ALL_ALIVE:
            return UNLISTED, KEY_NEG_INF, -1, num_alive(row, widest)
        if p.top_p >= TOP_P_OFF and are_many(maxima, least):
            return UNLISTED, I32(least - I32(1)), -1, num_from(row, maxima, least)
    n = keep_listed(row, maxima, top, least, p, keys, ids, spare, weights)
    return n, least, -1, n


@kernel
def list_cut(row: Any, maxima: Any, key: np.int32, last: int, keys: Any, ids: Any) -> int:
    """List what a cut keeps; return how many."""
    n, left = gather(row, maxima, max(key, ALL_ALIVE), keys, ids), 0
    for i in range(n):
        keys[left], ids[left] = keys[i], ids[i]
        left += keys[i] > key or ids[i] <= last
    return left


@kernel
def coin_falls(probability: np.float32, seed: np.uint64, position: np.uint32, child: np.uint32) -> bool:
    """Whether the coin of this token is at most a probability; it never is at 0."""
    if probability == ZERO:
        return False
    return bool(unit(word_of_id(0, position, child, PURPOSE_COIN, U32(seed), U32(seed >> U64(32)))) <= probability)


@folded
def draw_listed(
    keys: Any, ids: Any, n: int, top: np.int32, p: Any, seed: np.uint64, position: np.uint32, child: np.uint32,
    weights: Any, words: Any,
) -> tuple[int, int, int, np.int32, int]:  # fmt: skip
    """XTC and the draw, of n listed tokens: as `sample_row`."""
    if coin_falls(p.xtc_probability, seed, position, child):
        n, top = drop_top_choices(keys, ids, n, top, p.reciprocal, p.xtc_threshold, weights)
    _, token = draw_kept(keys, ids, n, logit_of_key(top), p.reciprocal, 0, seed, position, child, words)
    return token, OK, n, top, n


@folded
def list_typical(
    row: Any, top: np.int32, p: Any, maxima: Any, keys: Any, ids: Any, spare: Any, weights: Any
) -> tuple[int, np.int32]:
    """Where typical-p comes first, what it leaves is the row of the filters: (number listed, largest key)."""
    n = keep_typical(row, maxima, top, p, keys, ids, spare, weights)
    bits, left_ids = np.empty(n, np.int32), ids[:n].copy()
    for i in range(n):
        bits[i] = key_of_bits(keys[i])
    left = as_row(bits)
    maxima = np.empty((n + BLOCK - 1) // BLOCK, np.int32)
    top, widest = block_maxima(left, maxima)
    n, key, last, _ = keep_prefix(left, maxima, top, widest, p, keys, ids, spare, weights)
    if n == UNLISTED:
        n = list_cut(left, maxima, key, last, keys, ids)
    for i in range(n):
        ids[i] = left_ids[ids[i]]
    return n, top


@folded
def cut_row(
    row: Any, highest: np.int32, widest: np.uint32, p: Any, seed: np.uint64, position: np.uint32, child: np.uint32,
    listing: bool, maxima: Any, keys: Any, ids: Any, spare: Any, weights: Any, words: Any,
) -> tuple[int, int, int, np.int32, int, np.int32, int]:  # fmt: skip
    """One row as far as its draw: (token, status, number kept, largest key kept, n, key, last).

    n = UNLISTED: the token is still to be drawn, from the tokens before the cut (key, last). Else the first n of keys
    and ids hold the kept tokens, ascending by id. With `listing` all but whole rows are listed.
    """
    if is_bad(highest, widest):
        return NO_TOKEN, BAD, 0, highest, 0, highest, -1
    if highest <= KEY_NEG_INF:
        return NO_TOKEN, EMPTY, 0, highest, 0, highest, -1
    top = flush_key(highest)
    if p.greedy:
        keys[0], ids[0] = top, lowest_id(row, maxima, top)
        return ids[0], OK, 1, top, 1, top, -1
    key, last, kept = KEY_NEG_INF, -1, 0
    if p.typical_p < TYPICAL_P_OFF:
        n, top = list_typical(row, top, p, maxima, keys, ids, spare, weights)
    else:
        n, key, last, kept = keep_prefix(row, maxima, top, widest, p, keys, ids, spare, weights)
    if n == UNLISTED:
        whole = key == KEY_NEG_INF
        if (whole or not listing) and not coin_falls(p.xtc_probability, seed, position, child):
            return NO_TOKEN, OK, kept, top, UNLISTED, key, last
        n = list_cut(row, maxima, key, last, keys, ids)
    token, status, kept, top, n = draw_listed(keys, ids, n, top, p, seed, position, child, weights, words)
    return token, status, kept, top, n, key, last


@folded
def sample_row(
    row: Any, highest: np.int32, widest: np.uint32, p: Any, seed: np.uint64, position: np.uint32, child: np.uint32,
    listing: bool, maxima: Any, keys: Any, ids: Any, spare: Any, weights: Any, words: Any,
) -> tuple[int, int, int, np.int32, int]:  # fmt: skip
    """One row whose block maxima were read, plain or a view: (token, status, number kept, largest key kept, n).

    The first n of keys and ids hold the kept tokens, ascending by id; n = UNLISTED: none is listed, which happens with
    `listing` only where all are kept.
    """
    token, status, kept, top, n, key, last = cut_row(
        row, highest, widest, p, seed, position, child, listing, maxima, keys, ids, spare, weights, words
    )
    if n == UNLISTED:
        _, token = draw_row(
            row, maxima, top, logit_of_key(top), p.reciprocal, key, last, 0, seed, position, child, words
        )
    return token, status, kept, top, n


@kernel
def sample_rows(
    room: Any, rows: Any, width: int, chosen: Any, params: Any, seeds: Any, positions: Any, children: Any,
    token_ids: Any, status: Any, num_kept: Any,
) -> None:  # fmt: skip
    """The chosen rows. rows: [R, >= width], as `bits_of` reads it; all else by row.

    room: from `klero.rows.room`.
    """
    (maxima, keys, ids, spare, weights, words), _ = carve(room, width)
    for r in chosen:
        row = rows[r][:width]
        highest, widest = block_maxima(row, maxima)
        token_ids[r], status[r], num_kept[r], _, _ = sample_row(
            row, highest, widest, params[r], seeds[r], positions[r], children[r],
            False, maxima, keys, ids, spare, weights, words,
        )  # fmt: skip
