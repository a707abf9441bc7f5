"""The draw for Numba: Gumbel-max that computes few lots. Agreement: *bits* of the score, *token*.

A token of a chunk whose largest scaled logit is `smax` can only win when its lot reaches best - smax. Lots never rise
with their word, so that is a limit on the word: words are made for all (they vectorise), lots for the few below the
limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import F32, I32, I64, KEY_NEG_INF, flush, key_of_bits
from klero.lots.noise.cpu import lot_of_word
from klero.lots.philox.cpu import U32, U64, philox4x32
from klero.lots.pinned.cpu import ZERO, exp32
from klero.sampling.filters.cpu import logit_of_key
from klero.sampling.maxima.cpu import BLOCK, bits_of

LARGEST_LOT = F32(22.873857)
NEVER = F32(-np.inf)
ALL_WORDS = U32(2**32 - 1)
TWO_32, SLACK = F32(2.0**32), F32(1.0001)
PURPOSE_DRAW = U32(0)
CHUNK = 256


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


@kernel
def fill_words(
    first: int, size: int, position: np.uint32, child: np.uint32, seed: np.uint64, words: Any
) -> np.uint32:
    """Write the words of the C counters that cover ids first .. first + size - 1; return the least of them.

    words: uint32 [>= size + 8]; token i has words[(i & 3) * C + (i >> 2) - (first >> 2)]. The least is looked for apart:
    in one loop with Philox it would cost the registers that Philox needs.
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


@kernel
def draw_block(
    row: Any, b: int, smax: np.float32, maximum: np.float32, reciprocal: np.float32, first_id: int,
    seed: np.uint64, position: np.uint32, child: np.uint32, words: Any, best: np.float32, best_id: int,
) -> tuple[np.float32, int]:  # fmt: skip
    """Let every token of block b with l > -inf draw; return the better of its best and (best, best_id)."""
    block = row[b * BLOCK : (b + 1) * BLOCK]
    first = first_id + b * BLOCK
    limit = word_limit(best, smax)
    if fill_words(first, block.size, position, child, seed, words) > limit:
        return best, best_id
    count = ((first + block.size - 1) >> 2) - (first >> 2) + 1
    for i in range(block.size):
        token = first + i
        word = words[(token & 3) * count + (token >> 2) - (first >> 2)]
        if word > limit:
            continue
        bits = flush(bits_of(block[i]))
        if key_of_bits(bits) == KEY_NEG_INF:
            continue
        score = (I32(bits).view(np.float32) - maximum) * reciprocal + lot_of_word(word)
        if score > best or (score == best and token < best_id):
            best, best_id = score, token
    return best, best_id


@kernel
def draw_row(
    row: Any, maxima: Any, top: np.int32, maximum: np.float32, reciprocal: np.float32, first_id: int,
    seed: np.uint64, position: np.uint32, child: np.uint32, words: Any,
) -> tuple[np.float32, int]:  # fmt: skip
    """Draw from a whole row (or a shard of one, with the maximum of the whole). Returns (best score, its id).

    The block with the largest maximum goes first, so that most others are skipped. top: a key to start at.
    """
    best, best_id = NEVER, I64(2**62)
    start = 0
    for b in range(maxima.size):
        if maxima[b] == top:
            start = b
            break
    for step in range(maxima.size):
        b = start if step == 0 else (step if step > start else step - 1)
        smax = (logit_of_key(maxima[b]) - maximum) * reciprocal
        if smax + LARGEST_LOT < best or maxima[b] == KEY_NEG_INF:
            continue
        best, best_id = draw_block(
            row, b, smax, maximum, reciprocal, first_id, seed, position, child, words, best, best_id
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
            token = first_id + part_ids[j]
            a, b, c, d = philox4x32(U32(token >> 2), position, child, PURPOSE_DRAW, k0, k1)
            lane = token & 3
            line[j] = (a if lane == 0 else b) if lane < 2 else (c if lane == 2 else d)
            largest = part_keys[j] if part_keys[j] > largest else largest
        limit = word_limit(best, (logit_of_key(largest) - maximum) * reciprocal)
        for j in range(size):
            if line[j] > limit:
                continue
            score = (logit_of_key(part_keys[j]) - maximum) * reciprocal + lot_of_word(line[j])
            token = first_id + part_ids[j]
            if score > best or (score == best and token < best_id):
                best, best_id = score, token
    return best, best_id
