"""The draw for Numba: Gumbel-max that computes few lots. Agreement: *bits* of the score, *token*.

A token of a chunk whose largest scaled logit is `smax` can only win when its lot reaches best - smax. Lots never rise
with their word, so that is a limit on the word: words are made for all (they vectorise), lots for the few below the
limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import inline, kernel
from klero.lots.mass.cpu import F32, I32, I64, KEY_NEG_INF, flush, key_of_bits
from klero.lots.noise.cpu import lot_of_word
from klero.lots.philox.cpu import U32, U64, philox4x32, word_of_id
from klero.lots.pinned.cpu import ZERO, exp32
from klero.rows.lanes import LANES, lowest_bit, words_at_most
from klero.rows.maxima.cpu import lowest_id
from klero.rows.room import CHUNK
from klero.rows.select.cpu import logit_of_key
from klero.rows.view.cpu import BLOCK, bits_at, width_of

LARGEST_LOT = F32(22.873857)
LN_2_UP = F32(0.693148)
NEVER = F32(-np.inf)
ALL_WORDS = U32(2**32 - 1)
TWO_32, SLACK = F32(2.0**32), F32(1.0001)
PURPOSE_DRAW = U32(0)


@kernel
def word_limit(best: np.float32, smax: np.float32) -> np.uint32:
    """No word above the limit can make a score of `best` or more from a scaled logit of at most smax.

    lot >= y needs (x + 0.5) / 2^32 <= 1 - exp(-exp(-y)) <= exp(-y); lots are within 2e-7 * max(1, |g|) of the exact
    value and the score is rounded once, together below 1e-5, which the slack of 1e-4 and one word covers.
    """
    y = best - smax
    if not y > ZERO:
        return ALL_WORDS
    limit = exp32(-y) * TWO_32 * SLACK
    return U32(limit) + U32(1) if limit < F32(4.0e9) else ALL_WORDS


@inline
def lot_bound(word: np.uint32) -> np.float32:
    """No lot of this word is larger: (clz + 1) * 0.693148, and rounding to binary32 may take one off clz."""
    exponent = np.float32(F32(word)).view(np.int32) >> I32(23)
    return F32(I32(160) - exponent) * LN_2_UP


@kernel
def fill_words(
    first: int, size: int, position: np.uint32, child: np.uint32, seed: np.uint64, words: Any
) -> np.uint32:
    """Write the words of the C counters that cover ids first .. first + size - 1; return the least of them.

    words: uint32 [>= size + 8]; token i has words[(i & 3) * C + (i >> 2) - (first >> 2)]. The least is looked for
    apart: in one loop with Philox it would cost the registers that Philox needs.
    """
    begin = first >> 2
    count = ((first + size - 1) >> 2) - begin + 1
    k0, k1 = U32(seed), U32(seed >> U64(32))
    w0, w1 = words[:count], words[count : 2 * count]
    w2, w3 = words[2 * count : 3 * count], words[3 * count : 4 * count]
    for j in range(count):
        w0[j], w1[j], w2[j], w3[j] = philox4x32(U32(begin + j), position, child, PURPOSE_DRAW, k0, k1)
    least, made = ALL_WORDS, words[: 4 * count]
    for j in range(made.size):
        least = made[j] if made[j] < least else least
    return least


@inline
def is_kept(key: np.int32, token: int, cut_key: np.int32, last: int) -> bool:
    """Whether a token is before a cut."""
    return bool(key > cut_key or (key == cut_key and token <= last))


@kernel
def draw_chunk(
    row: Any, begin: int, smax: np.float32, maximum: np.float32, reciprocal: np.float32, cut_key: np.int32, last: int,
    first_id: int, seed: np.uint64, position: np.uint32, child: np.uint32, words: Any, best: np.float32, best_id: int,
) -> tuple[np.float32, int]:  # fmt: skip
    """Let row[begin : begin + CHUNK] draw, before the cut; return the better of its best and (best, best_id)."""
    size = min(CHUNK, width_of(row) - begin)
    first = first_id + begin
    limit = word_limit(best, smax)
    if fill_words(first, size, position, child, seed, words) > limit:
        return best, best_id
    count = ((first + size - 1) >> 2) - (first >> 2) + 1
    words[4 * count : 4 * count + LANES] = ALL_WORDS
    for part in range(0, 4 * count, LANES):
        mask = words_at_most(words, part, limit)
        while mask != U32(0):
            k = part + lowest_bit(mask)
            mask = U32(mask & (mask - U32(1)))
            i = 4 * (k % count) + k // count - (first & 3)
            if i < 0 or i >= size or k >= 4 * count:
                continue
            bits = flush(bits_at(row, begin + i))
            s = (I32(bits).view(np.float32) - maximum) * reciprocal
            if not is_kept(key_of_bits(bits), begin + i, cut_key, last) or s + lot_bound(words[k]) < best:
                continue
            score = s + lot_of_word(words[k])
            if score > best or (score == best and first + i < best_id):
                best, best_id = score, first + i
    return best, best_id


@kernel
def draw_likeliest(
    row: Any, maxima: Any, top: np.int32, cut_key: np.int32, last: int, first_id: int,
    seed: np.uint64, position: np.uint32, child: np.uint32,
) -> tuple[np.float32, int]:  # fmt: skip
    """(score, id) of the likeliest token; never, and an id that none has, if it is not here or past the cut."""
    likeliest = lowest_id(row, maxima, top)
    if likeliest >= 0 and is_kept(top, likeliest, cut_key, last):  # in a shard the lowest of equal ones may be past it
        word = word_of_id(
            first_id + likeliest, position, child, PURPOSE_DRAW, U32(seed), U32(seed >> U64(32))
        )  # fmt: skip
        return lot_of_word(word), I64(first_id + likeliest)
    return NEVER, I64(2**62)


@kernel
def draw_row(
    row: Any, maxima: Any, top: np.int32, maximum: np.float32, reciprocal: np.float32, cut_key: np.int32, last: int,
    first_id: int, seed: np.uint64, position: np.uint32, child: np.uint32, words: Any,
) -> tuple[np.float32, int]:  # fmt: skip
    """Draw from a whole row (or a shard of one, with the maximum of the whole). Returns (best score, its id).

    Those with a key above the cut draw, and those at it up to the place `last` in the row; the key of -inf and -1 leave
    every token that can be drawn. The likeliest token draws first, so that whole chunks of the others are skipped or
    make no lot. top: its key.
    """
    best, best_id = draw_likeliest(row, maxima, top, cut_key, last, first_id, seed, position, child)
    return draw_others(
        row, maxima, maximum, reciprocal, cut_key, last, first_id, seed, position, child, words, best, best_id
    )


@kernel
def draw_others(
    row: Any, maxima: Any, maximum: np.float32, reciprocal: np.float32, cut_key: np.int32, last: int, first_id: int,
    seed: np.uint64, position: np.uint32, child: np.uint32, words: Any, best: np.float32, best_id: int,
) -> tuple[np.float32, int]:  # fmt: skip
    """The same, after somebody (best, best_id) drew."""
    for begin in range(0, width_of(row), CHUNK):
        largest = KEY_NEG_INF
        for b in range(begin // BLOCK, min((begin + CHUNK) // BLOCK, maxima.size)):
            largest = max(largest, maxima[b])
        smax = (logit_of_key(largest) - maximum) * reciprocal
        if smax + LARGEST_LOT < best or largest == KEY_NEG_INF or largest < cut_key:
            continue
        best, best_id = draw_chunk(
            row, begin, smax, maximum, reciprocal, cut_key, last, first_id, seed, position, child, words, best, best_id
        )
    return best, best_id


@kernel
def draw_kept(
    keys: Any, ids: Any, n: int, maximum: np.float32, reciprocal: np.float32, first_id: int,
    seed: np.uint64, position: np.uint32, child: np.uint32, words: Any,
) -> tuple[np.float32, int]:  # fmt: skip
    """Draw from n listed tokens. keys, ids: from `gather`. Returns (best score, its id)."""
    best, best_id = NEVER, I64(2**62)
    k0, k1 = U32(seed), U32(seed >> U64(32))
    line = words[:CHUNK]
    for begin in range(0, n, CHUNK):
        size = min(CHUNK, n - begin)
        part_keys, part_ids = keys[begin : begin + size], ids[begin : begin + size]
        largest = part_keys[0]
        for j in range(size):
            line[j] = word_of_id(first_id + part_ids[j], position, child, PURPOSE_DRAW, k0, k1)
            largest = part_keys[j] if part_keys[j] > largest else largest
        limit = word_limit(best, (logit_of_key(largest) - maximum) * reciprocal)
        for j in range(size):
            if line[j] > limit:
                continue
            s = (logit_of_key(part_keys[j]) - maximum) * reciprocal
            if s + lot_bound(line[j]) < best:
                continue
            score = s + lot_of_word(line[j])
            token = first_id + part_ids[j]
            if score > best or (score == best and token < best_id):
                best, best_id = score, token
    return best, best_id
