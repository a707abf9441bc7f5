"""The fused pass for Numba: block maxima first, then only what the row's parameters ask for."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import KEY_NEG_INF, U64, key_of_bits
from klero.lots.noise.cpu import U32, unit
from klero.lots.noise.reference import COIN
from klero.lots.philox.cpu import word_of_id
from klero.rows.maxima.cpu import block_maxima, lowest_id
from klero.rows.select.cpu import ALL_ALIVE, block_masses, fill_masses, gather, keep_top_k, logit_of_key, top_k_bound
from klero.rows.view.cpu import BLOCK, flush_key, is_bad, num_alive, width_of
from klero.sampling.draw.cpu import CHUNK, draw_kept, draw_row
from klero.sampling.filters.cpu import drop_top_choices, keep_nucleus, min_p_key, needed_mass, nucleus_bound, tail_bound
from klero.sampling.filters.thresholds.cpu import least_kept
from klero.sampling.filters.typical.cpu import keep_typical
from klero.sampling.status import BAD, EMPTY, NO_TOKEN, OK

TOP_P_OFF = TYPICAL_P_OFF = U64(2**32)
ZERO = np.float32(0)
WHOLE_ROW = -1  # in place of a number kept: every token is left, and none is listed
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
    """Of the tokens from the key `least` on, min-p and top-k, then top-p among what they left. Returns how many.

    Gathers the candidates and cuts the list.
    """
    maximum = logit_of_key(top)
    threshold = least
    if p.min_p > ZERO:
        threshold = max(threshold, min_p_key(top, maximum, p.reciprocal, p.min_p))
    if p.top_k < width_of(row) and (least == ALL_ALIVE or are_many(maxima, least)):
        threshold = max(threshold, top_k_bound(row, maxima, p.top_k, spare, weights))
    n = gather(row, maxima, threshold, keys, ids)
    if n > p.top_k:
        n = keep_top_k(keys, ids, n, p.top_k, spare, weights)
    if p.top_p < TOP_P_OFF:
        need = needed_mass(fill_masses(keys, n, maximum, p.reciprocal, weights), p.top_p)
        n = keep_nucleus(keys, ids, n, need, maximum, p.reciprocal, spare, weights)
    return int(n)


@kernel
def keep_top_p(row: Any, maxima: Any, top: np.int32, p: Any, keys: Any, ids: Any, spare: Any, weights: Any) -> int:
    """top-p alone: the mass of the whole row, then a list that surely holds the nucleus. Returns its length."""
    maximum = logit_of_key(top)
    sums, rest = weights[: maxima.size], weights[maxima.size :]
    mass = block_masses(row, maxima, maximum, p.reciprocal, sums)
    need = needed_mass(mass, p.top_p)
    threshold = nucleus_bound(row, maxima, need, maximum, p.reciprocal, spare, rest)
    if threshold == KEY_NEG_INF:
        threshold = tail_bound(maxima, sums, mass - need, top, maximum, p.reciprocal)
    n = gather(row, maxima, threshold, keys, ids)
    fill_masses(keys, n, maximum, p.reciprocal, weights)
    return int(keep_nucleus(keys, ids, n, need, maximum, p.reciprocal, spare, weights))


@kernel
def keep_prefix(
    row: Any, maxima: Any, top: np.int32, widest: np.uint32, p: Any, keys: Any, ids: Any, spare: Any, weights: Any
) -> int:
    """List what the filters before XTC leave; return how many. WHOLE_ROW, and no list, where none removes a token."""
    least = ALL_ALIVE
    if p.top_n_sigma > ZERO or p.epsilon > U64(0) or p.eta > ZERO or p.top_a > U64(0):
        least = least_kept(row, maxima, top, widest, p)
    if least > top:
        keys[0], ids[0] = top, lowest_id(row, maxima, top)
        return 1
    if least > ALL_ALIVE or p.min_p > ZERO or p.top_k < width_of(row):
        return int(keep_listed(row, maxima, top, least, p, keys, ids, spare, weights))
    if p.top_p < TOP_P_OFF:
        return int(keep_top_p(row, maxima, top, p, keys, ids, spare, weights))
    return WHOLE_ROW


@kernel
def coin_falls(probability: np.float32, seed: np.uint64, position: np.uint32, child: np.uint32) -> bool:
    """Whether the coin of this token is at most a probability; it never is at 0."""
    if probability == ZERO:
        return False
    return bool(unit(word_of_id(0, position, child, PURPOSE_COIN, U32(seed), U32(seed >> U64(32)))) <= probability)


@kernel
def draw_listed(
    keys: Any, ids: Any, n: int, top: np.int32, p: Any, seed: np.uint64, position: np.uint32, child: np.uint32,
    weights: Any, words: Any,
) -> tuple[int, int, int, np.int32, int]:  # fmt: skip
    """XTC and the draw, of n listed tokens: as `sample_row`."""
    if coin_falls(p.xtc_probability, seed, position, child):
        n, top = drop_top_choices(keys, ids, n, top, p.reciprocal, p.xtc_threshold, weights)
    _, token = draw_kept(keys, ids, n, logit_of_key(top), p.reciprocal, 0, seed, position, child, words)
    return token, OK, n, top, n


@kernel
def sample_typical(
    row: Any, top: np.int32, p: Any, seed: np.uint64, position: np.uint32, child: np.uint32,
    maxima: Any, keys: Any, ids: Any, spare: Any, weights: Any, words: Any,
) -> tuple[int, int, int, np.int32, int]:  # fmt: skip
    """As `sample_row`, where typical-p comes first: what it leaves is the row of the other filters."""
    n = keep_typical(row, maxima, top, p, keys, ids, spare, weights)
    left, left_ids = np.empty(n, np.int32), ids[:n].copy()
    for i in range(n):
        left[i] = key_of_bits(keys[i])
    maxima = np.empty((n + BLOCK - 1) // BLOCK, np.int32)
    top, widest = block_maxima(left, maxima)
    n = keep_prefix(left, maxima, top, widest, p, keys, ids, spare, weights)
    if n == WHOLE_ROW:
        n = gather(left, maxima, ALL_ALIVE, keys, ids)
    for i in range(n):
        ids[i] = left_ids[ids[i]]
    return draw_listed(keys, ids, n, top, p, seed, position, child, weights, words)


@kernel
def sample_row(
    row: Any, highest: np.int32, widest: np.uint32, p: Any, seed: np.uint64, position: np.uint32, child: np.uint32,
    maxima: Any, keys: Any, ids: Any, spare: Any, weights: Any, words: Any,
) -> tuple[int, int, int, np.int32, int]:  # fmt: skip
    """One row whose block maxima were read, plain or a view: (token, status, number kept, largest key kept, n).

    The first n of keys and ids hold the kept tokens, ascending by id; n = WHOLE_ROW: all are kept and none is listed.
    """
    if is_bad(highest, widest):
        return NO_TOKEN, BAD, 0, highest, 0
    if highest <= KEY_NEG_INF:
        return NO_TOKEN, EMPTY, 0, highest, 0
    top = flush_key(highest)
    if p.greedy:
        keys[0], ids[0] = top, lowest_id(row, maxima, top)
        return ids[0], OK, 1, top, 1
    if p.typical_p < TYPICAL_P_OFF:
        return sample_typical(row, top, p, seed, position, child, maxima, keys, ids, spare, weights, words)
    n = keep_prefix(row, maxima, top, widest, p, keys, ids, spare, weights)
    if n == WHOLE_ROW:
        if not coin_falls(p.xtc_probability, seed, position, child):
            _, token = draw_row(row, maxima, top, logit_of_key(top), p.reciprocal, 0, seed, position, child, words)
            return token, OK, num_alive(row, widest), top, WHOLE_ROW
        n = gather(row, maxima, ALL_ALIVE, keys, ids)
    return draw_listed(keys, ids, n, top, p, seed, position, child, weights, words)


@kernel
def room_for(width: int) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Scratch for rows of a width: maxima, keys, ids, spare, weights, words."""
    keys, ids, spare = np.empty(width + 1, np.int32), np.empty(width + 1, np.int32), np.empty(width + 1, np.int32)
    maxima = np.empty((width + BLOCK - 1) // BLOCK, np.int32)
    return maxima, keys, ids, spare, np.empty(width + 1, np.uint64), np.empty(CHUNK + 8, np.uint32)


@kernel
def sample_rows(
    rows: Any, width: int, chosen: Any, params: Any, seeds: Any, positions: Any, children: Any,
    token_ids: Any, status: Any, num_kept: Any,
) -> None:  # fmt: skip
    """The chosen rows. rows: int32 (float32 bits) or uint16 (bfloat16 bits) [R, >= width]; all else by row."""
    maxima, keys, ids, spare, weights, words = room_for(width)
    for r in chosen:
        row = rows[r][:width]
        highest, widest = block_maxima(row, maxima)
        token_ids[r], status[r], num_kept[r], _, _ = sample_row(
            row, highest, widest, params[r], seeds[r], positions[r], children[r],
            maxima, keys, ids, spare, weights, words,
        )  # fmt: skip
