"""The fused pass for Numba: block maxima first, then only what the row's parameters ask for."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import I32, KEY_NEG_INF, U64
from klero.sampling.draw.cpu import CHUNK, draw_kept, draw_row
from klero.sampling.filters.cpu import (
    block_masses,
    fill_masses,
    gather,
    keep_nucleus,
    keep_top_k,
    logit_of_key,
    min_p_key,
    needed_mass,
    nucleus_bound,
    tail_bound,
    top_k_bound,
)
from klero.sampling.maxima.cpu import BLOCK, block_maxima, flush_key, is_bad, lowest_id, num_alive
from klero.sampling.status import BAD, EMPTY, NO_TOKEN, OK

TOP_P_OFF = U64(2**32)
ZERO = np.float32(0)


@kernel
def keep_listed(row: Any, maxima: Any, top: np.int32, p: Any, keys: Any, ids: Any, spare: Any, weights: Any) -> int:
    """min-p and top-k, then top-p among what they left: gather the candidates and cut the list. Returns its length."""
    maximum = logit_of_key(top)
    threshold = I32(KEY_NEG_INF + 1)
    if p.min_p > ZERO:
        threshold = min_p_key(top, maximum, p.reciprocal, p.min_p)
    if p.top_k < row.size:
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
def sample_row(
    row: Any, p: Any, seed: np.uint64, position: np.uint32, child: np.uint32,
    maxima: Any, keys: Any, ids: Any, spare: Any, weights: Any, words: Any,
) -> tuple[int, int, int]:  # fmt: skip
    """One row: (token, status, number kept)."""
    highest, widest = block_maxima(row, maxima)
    if is_bad(highest, widest):
        return NO_TOKEN, BAD, 0
    if highest <= KEY_NEG_INF:
        return NO_TOKEN, EMPTY, 0
    top = flush_key(highest)
    if p.greedy:
        return lowest_id(row, maxima, top), OK, 1
    if p.min_p > ZERO or p.top_k < row.size:
        n = keep_listed(row, maxima, top, p, keys, ids, spare, weights)
    elif p.top_p < TOP_P_OFF:
        n = keep_top_p(row, maxima, top, p, keys, ids, spare, weights)
    else:
        _, token = draw_row(
            row, maxima, top, logit_of_key(top), p.reciprocal, 0, seed, position, child, words
        )
        return token, OK, num_alive(row, widest)
    _, token = draw_kept(keys, ids, n, logit_of_key(top), p.reciprocal, 0, seed, position, child, words)
    return token, OK, n


@kernel
def sample_rows(
    rows: Any, chosen: Any, params: Any, seeds: Any, positions: Any, children: Any,
    token_ids: Any, status: Any, num_kept: Any,
) -> None:  # fmt: skip
    """The chosen rows. rows: int32 (float32 bits) or uint16 (bfloat16 bits) [R, V]; all else is indexed by row."""
    size = rows.shape[1]
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.int32)
    keys, ids, spare = np.empty(size + 1, np.int32), np.empty(size + 1, np.int32), np.empty(size + 1, np.int32)
    weights = np.empty(size + 1, np.uint64)
    words = np.empty(CHUNK + 8, np.uint32)
    for r in chosen:
        token_ids[r], status[r], num_kept[r] = sample_row(
            rows[r], params[r], seeds[r], positions[r], children[r], maxima, keys, ids, spare, weights, words
        )
