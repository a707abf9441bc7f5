"""Logprobs for Numba: a level for each row, the rank by counting, the top list by selection. Agreement: *bits*."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import F32, I32, I64, KEY_NEG_INF, U64, key_of_bits
from klero.lots.pinned.cpu import log32
from klero.rows.lanes import bits_of
from klero.rows.maxima.cpu import block_maxima
from klero.rows.room import carve
from klero.rows.select.cpu import block_masses, fill_masses, logit_of_key
from klero.rows.topk.cpu import list_top, sort_listed
from klero.rows.view.cpu import bits_at, block_of, flush_key, is_bad

TWO_M40, ONE = F32(2.0**-40), F32(1)
NEG_INF = F32(-np.inf)


@kernel
def lse(mass: np.uint64) -> np.float32:
    """ln(Q * 2^-40); -inf of nothing."""
    return log32(F32(I64(mass)) * TWO_M40) if mass > U64(0) else NEG_INF


@kernel
def key_at(row: Any, i: int) -> np.int32:
    """The key of one token, flushed."""
    return flush_key(key_of_bits(bits_at(row, i)))


@kernel
def key_in_list(keys: Any, ids: Any, n: int, token: int) -> np.int32:
    """The key of one token where only n listed ones, ascending by id, are left: that of -inf for the others."""
    i = np.searchsorted(ids[:n], token)
    return keys[i] if i < n and ids[i] == token else KEY_NEG_INF


@kernel
def logprob_of_key(key: np.int32, maximum: np.float32, reciprocal: np.float32, level: np.float32) -> np.float32:
    """s - lse(Q)."""
    return F32((logit_of_key(key) - maximum) * reciprocal) - level


@kernel
def rank_of(row: Any, maxima: Any, key: np.int32) -> int:
    """1 + the tokens with a larger key; blocks without one are skipped."""
    count = 1
    for b in range(maxima.size):
        if maxima[b] > key:
            block = block_of(row, b)
            larger = I32(0)
            for i in range(block.size):
                larger = I32(larger + I32(flush_key(key_of_bits(bits_of(block[i]))) > key))
            count += larger
    return count


@kernel
def write_removed(ids: Any, n: int, k: int, said: Any, r: int) -> None:
    """The end of a top list of k: those that are not among n listed tokens, ascending by id, the lower ids first."""
    first = said.top_starts[r]
    said.top[first + n : first + k] = NEG_INF
    removed, i = said.top_ids[first + n : first + k], 0
    for j in range(removed.size):
        while i < n and ids[i] == i + j:
            i += 1
        removed[j] = i + j


@kernel
def write_top(
    keys: Any, ids: Any, k: int, level: np.float32, maximum: np.float32, reciprocal: np.float32, said: Any, r: int
) -> None:
    """The first k listed tokens as the first k of the top list of a row."""
    first = said.top_starts[r]
    for j in range(k):
        said.top_ids[first + j] = ids[j]
        said.top[first + j] = logprob_of_key(keys[j], maximum, reciprocal, level)


@kernel
def write_row(
    row: Any, maxima: Any, token: int, level: np.float32, maximum: np.float32, reciprocal: np.float32, asks: Any,
    said: Any, r: int, keys: Any, ids: Any, spare: Any, weights: Any,
) -> None:  # fmt: skip
    """Rank, listed ids and top list of a whole row. keys, ids: overwritten."""
    said.rank[r] = rank_of(row, maxima, key_at(row, token))
    for e in range(asks.listed_starts[r], asks.listed_starts[r + 1]):
        said.listed[e] = logprob_of_key(key_at(row, asks.listed_ids[e]), maximum, reciprocal, level)
    k = asks.num_top[r]
    if k > 0:
        list_top(row, maxima, k, keys, ids, spare, weights)
        write_top(keys, ids, k, level, maximum, reciprocal, said, r)


@kernel
def write_list(
    token: int, keys: Any, ids: Any, n: int, level: np.float32, maximum: np.float32, reciprocal: np.float32,
    asks: Any, said: Any, r: int,
) -> None:  # fmt: skip
    """The same where only n listed tokens are left, ascending by id; they are sorted. All others are at -inf."""
    said.rank[r] = 1 + np.sum(keys[:n] > key_in_list(keys, ids, n, token))
    for e in range(asks.listed_starts[r], asks.listed_starts[r + 1]):
        key = key_in_list(keys, ids, n, asks.listed_ids[e])
        said.listed[e] = logprob_of_key(key, maximum, reciprocal, level)
    k = asks.num_top[r]
    if k > 0:
        write_removed(ids, n, k, said, r)
        sort_listed(keys, ids, n, np.empty(n, np.int32), np.empty(n, np.int32))
        write_top(keys, ids, min(k, n), level, maximum, reciprocal, said, r)


@kernel
def write_kept(
    keys: Any, ids: Any, n: int, maximum: np.float32, reciprocal: np.float32, said: Any, r: int, weights: Any
) -> None:
    """The listed tokens, ascending by id, and q * (1 / Q) of each."""
    k = said.kept_row[r]
    said.num_listed[r] = n
    share = ONE / F32(I64(fill_masses(keys, n, maximum, reciprocal, weights)))
    for i in range(n):
        said.kept_ids[k, i], said.kept_probs[k, i] = ids[i], F32(I64(weights[i])) * share


@kernel
def raw_level(row: Any, maxima: Any, top: np.int32, weights: Any) -> tuple[np.float32, np.float32]:
    """The largest logit of the model's row and its lse, at temperature 1. top: the largest key."""
    maximum = logit_of_key(top)
    return maximum, lse(block_masses(row, maxima, maximum, ONE, weights))


@kernel
def say_raw(
    row: Any, maxima: Any, maximum: np.float32, level: np.float32, token: int, asks: Any, said: Any, r: int,
    keys: Any, ids: Any, spare: Any, weights: Any,
) -> None:  # fmt: skip
    """Logprob, rank and lists of a token in the model's own row, where that is the mode. The lists are overwritten."""
    if not asks.processed[r]:
        said.sampled[r] = said.raw[r]
        write_row(row, maxima, token, level, maximum, ONE, asks, said, r, keys, ids, spare, weights)


@kernel
def score_rows(
    room: Any, rows: Any, width: int, begin: int, end: int, token_ids: Any, asks: Any, said: Any
) -> None:
    """Score one token of each row begin .. end - 1. rows: [R, >= V], as `bits_of` reads it."""
    (maxima, keys, ids, spare, weights, _), _ = carve(room, width)
    for r in range(begin, end):
        row = rows[r][:width]
        highest, widest = block_maxima(row, maxima)
        if is_bad(highest, widest) or highest <= KEY_NEG_INF:
            continue
        maximum, level = raw_level(row, maxima, flush_key(highest), weights)
        said.raw[r] = logprob_of_key(key_at(row, token_ids[r]), maximum, ONE, level)
        say_raw(row, maxima, maximum, level, token_ids[r], asks, said, r, keys, ids, spare, weights)
