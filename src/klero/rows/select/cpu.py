"""Selection for Numba: the largest tokens of a row, and their masses, without sorting it.

A cut is a key and a number of ties: tokens with a larger key are kept, and of those with an equal key the first few by
id. Candidates are gathered in ascending id order, so ties are settled by counting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from klero.device import inline, kernel
from klero.lots.mass.cpu import F32, I32, I64, KEY_NEG_INF, TINY, TWO_20, U64, flush, key_of_bits, mass_of_weight
from klero.lots.pinned.cpu import exp32
from klero.rows.lanes import LANES, bits_of, keys_at_least, lowest_bit
from klero.rows.maxima.cpu import largest_key
from klero.rows.view.cpu import BLOCK, U32, block_of, flush_key, is_pending, is_touched, raw_of, width_of

ONE = U64(1)
ALL_ALIVE = I32(KEY_NEG_INF + 1)
BUCKETS = 256
NO_MASS_BELOW = F32(-28)  # s of which w is below 2^-40


@inline
def logit_of_key(key: np.int32) -> np.float32:
    """The binary32 value behind an ordered key."""
    return I32(key_of_bits(key)).view(np.float32)


@inline
def mass_of_key(key: np.int32, maximum: np.float32, reciprocal: np.float32) -> np.uint64:
    """q of the logit behind a key."""
    return mass_of_weight(exp32((logit_of_key(key) - maximum) * reciprocal))


@kernel
def select(keys: Any, weights: Any, n: int, need: np.uint64) -> tuple[np.int32, np.uint64]:
    """The largest key t such that the weight of all keys >= t reaches `need`, and the weight strictly above t.

    A radix select over keys[:n] with weights[:n]: 256 buckets over the range of the keys, then the same within the
    bucket where the sum from above crosses `need`; at most 4 rounds. Both arrays are overwritten, weights as far as
    n + BUCKETS. Requires 1 <= need <= the sum.
    """
    above, sums = U64(0), weights[n : n + BUCKETS]
    low, high = I64(keys[0]), I64(keys[0])
    for i in range(n):
        low, high = min(low, I64(keys[i])), max(high, I64(keys[i]))
    while low < high:
        shift = 0
        while (high - low) >> shift >= BUCKETS:
            shift += 8
        sums[:] = 0
        for i in range(n):
            sums[(I64(keys[i]) - low) >> shift] += weights[i]
        bucket = (high - low) >> shift
        while above + sums[bucket] < need:
            above += sums[bucket]
            bucket -= 1
        low += bucket << shift
        high = min(high, low + (1 << shift) - 1)
        n = _keep_range(keys, weights, n, low, high)
    return I32(low), above


@kernel
def _keep_range(keys: Any, weights: Any, n: int, low: int, high: int) -> int:
    """Move the entries with low <= key <= high to the front; return how many there are."""
    left = 0
    for i in range(n):
        key, weight = keys[i], weights[i]
        keys[left], weights[left] = key, weight
        left += low <= key <= high
    return left


@inline
def unflushed(least: np.int32) -> np.int32:
    """The bound of unflushed keys for those whose flushed key is at least `least`."""
    if -TINY <= least < TINY:  # as in flush_key: -TINY is the key of the largest |l| that is flushed
        return TINY if least > I32(0) else I32(-TINY)
    return least


@kernel
def gather(row: Any, maxima: Any, threshold: np.int32, keys: Any, ids: Any) -> int:
    """Write keys and ids of all tokens with key >= threshold, by ascending id; blocks below it are skipped.

    keys, ids: at least V long.
    """
    return int(gather_most(row, maxima, threshold, width_of(row), keys, ids))


@kernel
def gather_most(row: Any, maxima: Any, threshold: np.int32, most: int, keys: Any, ids: Any) -> int:
    """The same, given up soon after more than `most` tokens were found."""
    n, raw, least = 0, raw_of(row), unflushed(threshold)
    for b in range(maxima.size):
        if maxima[b] < threshold:
            continue
        first, size = b * BLOCK, min(BLOCK, width_of(row) - b * BLOCK)
        if is_touched(row, b):
            n = gather_block(block_of(row, b), 0, size, first, least, keys, ids, n)
        else:
            n = gather_block(raw, first, size, first, least, keys, ids, n)
        if n > most:
            break
    return n


@kernel
def gather_block(
    stored: Any, start: int, size: int, first: int, least: np.int32, keys: Any, ids: Any, n: int
) -> int:  # fmt: skip
    """The same for stored[start : start + size], whose ids begin at `first`, behind n others; how many there are then.

    least: a bound of unflushed keys. Places instead of slices: every slice would count references, for each block.
    """
    whole = size // LANES * LANES
    for begin in range(start, start + whole, LANES):
        mask = keys_at_least(stored, begin, least)
        while mask != U32(0):
            i = begin + lowest_bit(mask)
            keys[n], ids[n] = flush_key(key_of_bits(bits_of(stored[i]))), first + i - start
            n += 1
            mask = U32(mask & (mask - U32(1)))
    for i in range(start + whole, start + size):
        key = key_of_bits(bits_of(stored[i]))
        if key >= least:
            keys[n], ids[n] = flush_key(key), first + i - start
            n += 1
    return n


@kernel
def num_from(row: Any, maxima: Any, threshold: np.int32) -> int:
    """How many tokens have a key >= threshold."""
    n, least = 0, unflushed(threshold)
    for b in range(maxima.size):
        if maxima[b] >= threshold:
            block, count = block_of(row, b), I32(0)
            for i in range(block.size):
                count = I32(count + I32(key_of_bits(bits_of(block[i])) >= least))
            n += count
    return n


@kernel
def keep_above(keys: Any, ids: Any, n: int, threshold: np.int32, ties: int) -> int:
    """Keep keys > threshold and the first `ties` equal ones, in place and in order; return how many are left."""
    left = 0
    for i in range(n):
        key = keys[i]
        tie = key == threshold
        keep = key > threshold or (tie and ties > 0)
        ties -= tie
        keys[left], ids[left] = key, ids[i]
        left += keep
    return left


@kernel
def maxima_of_blocks(row: Any, maxima: Any, size: int, keys: Any) -> int:
    """Write the largest key of every block of `size` tokens (a divisor of BLOCK); return how many blocks there are.

    Those of blocks whose mask was not applied yet are missing: -inf stands there.
    """
    if size == BLOCK:
        for b in range(maxima.size):
            keys[b] = KEY_NEG_INF if is_pending(row, b) else maxima[b]
        return int(maxima.size)
    count = 0
    for b in range(maxima.size):
        block = block_of(row, b)
        for begin in range(0, block.size, size):
            keys[count] = largest_key(block[begin : begin + size])
            count += 1
    return count


def settle_largest(row: Any, maxima: Any, k: int, keys: Any, weights: Any) -> Any:
    """Apply the mask of a view to the k blocks with the largest maxima, where those are bounds still."""
    raise RuntimeError("settle_largest is for kernels")


@overload(settle_largest, strict=False)
def _settle_largest(row: Any, maxima: Any, k: int, keys: Any, weights: Any) -> Any:
    if isinstance(row, types.Array):
        return lambda row, maxima, k, keys, weights: None

    def of_view(row: Any, maxima: Any, k: int, keys: Any, weights: Any) -> Any:
        if row.mask.size == 0:
            return
        least = ALL_ALIVE
        if k < maxima.size:
            keys[: maxima.size] = maxima
            weights[: maxima.size] = ONE
            least = max(least, select(keys, weights, maxima.size, U64(k))[0])
        for b in range(maxima.size):
            if maxima[b] >= least and is_pending(row, b):
                block_of(row, b)

    return of_view


@kernel
def top_k_bound(row: Any, maxima: Any, k: int, keys: Any, weights: Any) -> np.int32:
    """A key that at least k tokens reach: the k-th largest maximum of at least 2 k blocks.

    Where the row has fewer blocks, finer ones are read; with 2 k of them about 1.4 k tokens reach the bound. Any
    answer is right; below 8 tokens a block the bound is not worth its pass.
    """
    size, width = BLOCK, width_of(row)
    while size > 8 and width < 2 * k * size:
        size >>= 1
    if width < 2 * k * size:
        return KEY_NEG_INF
    settle_largest(row, maxima, 2 * k, keys, weights)
    count = maxima_of_blocks(row, maxima, size, keys)
    weights[:count] = ONE
    bound, _ = select(keys, weights, count, U64(k))
    return bound


@kernel
def keep_top_k(keys: Any, ids: Any, n: int, k: int, spare_keys: Any, weights: Any) -> int:
    """Cut the candidates to exactly k; ties go to the lowest ids."""
    for i in range(n):
        spare_keys[i], weights[i] = keys[i], ONE
    threshold, above = select(spare_keys, weights, n, U64(k))
    return int(keep_above(keys, ids, n, threshold, k - I64(above)))


@kernel
def fill_masses(keys: Any, n: int, maximum: np.float32, reciprocal: np.float32, weights: Any) -> np.uint64:
    """Write q of each candidate and return their sum."""
    total = U64(0)
    for i in range(n):
        q = mass_of_key(keys[i], maximum, reciprocal)
        weights[i] = q
        total += q
    return total


@kernel
def block_masses(row: Any, maxima: Any, maximum: np.float32, reciprocal: np.float32, out: Any) -> np.uint64:
    """Fill the mass of each block and return their sum; blocks whose maximum has mass 0 are skipped."""
    total, raw = U64(0), raw_of(row)
    for b in range(maxima.size):
        out[b] = U64(0)
        if (logit_of_key(maxima[b]) - maximum) * reciprocal < NO_MASS_BELOW:
            continue
        if is_touched(row, b):
            out[b] = mass_of_block(block_of(row, b), maximum, reciprocal)
        else:
            out[b] = mass_of_block(raw[b * BLOCK : (b + 1) * BLOCK], maximum, reciprocal)
        total += out[b]
    return total


@kernel
def two_masses(row: Any, maxima: Any, maximum: np.float32, reciprocal: np.float32) -> tuple[np.uint64, np.uint64]:
    """The masses of a row at temperature 1 and at another one, in one pass. row: plain."""
    first, second = U64(0), U64(0)
    for b in range(maxima.size):
        block, d = row[b * BLOCK : (b + 1) * BLOCK], logit_of_key(maxima[b]) - maximum
        weighs = d >= NO_MASS_BELOW
        if reciprocal == F32(1) or d * reciprocal < NO_MASS_BELOW:
            first += mass_of_block(block, maximum, F32(1)) if weighs else U64(0)
        elif weighs:
            q, at = two_masses_of_block(block, maximum, reciprocal)
            first, second = first + q, second + at
        else:
            second += mass_of_block(block, maximum, reciprocal)
    return first, first if reciprocal == F32(1) else second


@kernel
def two_masses_of_block(block: Any, maximum: np.float32, reciprocal: np.float32) -> tuple[np.uint64, np.uint64]:
    """The masses of one block at temperature 1 and at another one; summed as in `mass_of_block`."""
    high, low, high_at, low_at = I32(0), I32(0), I32(0), I32(0)
    for i in range(block.size):
        d = I32(flush(bits_of(block[i]))).view(np.float32) - maximum
        w, at = exp32(d) * TWO_20, exp32(d * reciprocal) * TWO_20
        h, k = I32(w), I32(at)
        high, high_at = I32(high + h), I32(high_at + k)
        low = I32(low + I32((w - F32(h)) * TWO_20))
        low_at = I32(low_at + I32((at - F32(k)) * TWO_20))
    return (U64(high) << U64(20)) + U64(low), (U64(high_at) << U64(20)) + U64(low_at)


@kernel
def mass_of_block(block: Any, maximum: np.float32, reciprocal: np.float32) -> np.uint64:
    """The mass of one block. The two 20-bit halves of q are summed apart in 32 bits (256 * 2^20 fits) and joined."""
    high, low = I32(0), I32(0)
    for i in range(block.size):
        logit = I32(flush(bits_of(block[i]))).view(np.float32)
        w = exp32((logit - maximum) * reciprocal) * TWO_20
        h = I32(w)
        high = I32(high + h)
        low = I32(low + I32((w - F32(h)) * TWO_20))
    return (U64(high) << U64(20)) + U64(low)
