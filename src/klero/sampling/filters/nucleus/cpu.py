"""top-p for Numba: read the row once more, cheaply, and weigh exactly only what is near the cut.

A row with a head: `bound_masses` brackets the mass of the row by a rough exponential, at a fifth of the cost of the
pinned one. The tokens that carry P of it are listed and weighed exactly; where both ends of the bracket cut at the same
token, that is the cut, and else the row is weighed exactly. A flat row: a sample of it brackets the key of the cut, one
exact pass adds up what lies above and lists what lies between, and what is kept is never listed.

A cut, (n, key, last, kept): the first n of keys and ids are what is kept, ascending by id; or, n = UNLISTED, tokens
with a larger key are kept, and those with this key up to the id `last`: `kept` tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import inline, kernel
from klero.lots.mass.cpu import F32, I32, I64, TWO_20, U64, flush, key_of_bits
from klero.lots.pinned.constants import LOG2_E, ROUND_MAGIC
from klero.lots.pinned.cpu import exp32
from klero.rows.lanes import LANES, add_in_any_order, bits_of, keys_at_least, lowest_bit, multiply_add, num_bits
from klero.rows.select.cpu import (
    ALL_ALIVE,
    NO_MASS_BELOW,
    ONE,
    block_masses,
    fill_masses,
    gather_most,
    keep_above,
    logit_of_key,
    mass_of_key,
    select,
    unflushed,
)
from klero.rows.view.cpu import BLOCK, U32, block_of, flush_key, is_touched, raw_of, width_of
from klero.sampling.filters.cpu import keep_nucleus, needed_mass

F64 = np.float64
UNLISTED = -1
UNSURE = -1
# 2^f for |f| <= 1/2, the interpolation at Chebyshev's points of degree 5
P0, P1, P2 = F32(1.00000012), F32(0.693147182), F32(0.240221068)
P3, P4, P5 = F32(0.0555035695), F32(0.00967603177), F32(0.00133908633)
NO_TERM_BELOW = F32(-100)
PART = 64  # terms that are summed in binary32, in any order
# How far the rough mass of a block may be off, relatively. ERROR: 63 sums of a PART, the polynomial and exp32, all of
# them 2^-24 a rounding: less than 2^-17.7. ERROR_OF_S, for every unit of |s|: of the block's largest token, two
# roundings here and two of the pinned way; of what a token is below it, four (LOG2_E, scale, difference, product) and
# two. Over the mass of a block of n tokens the latter is on the average at most W((n - 1) / e) = 3.3; ln n is allowed.
ERROR, ERROR_OF_S, LN_OF_BLOCK = F64(2.0**-17.5), F64(2.0**-21.5), F64(5.6)
FLAT_BLOCKS = 16  # rows of fewer blocks are never sampled for being flat
SAMPLED = 8  # of a block
MARGINS = F64(2.5), F64(10), F64(0)  # standard deviations of the sample; at last the whole row
TWO_M32, TWO_40 = F64(2.0**-32), F64(2.0**40)


@inline
def rough_term(bits: np.int32, largest: np.float32, scale: np.float32) -> np.float32:
    """2^((l - largest) * scale), not below 2^-100, by the next power and a polynomial."""
    y = (I32(bits).view(np.float32) - largest) * scale
    y = y if y > NO_TERM_BELOW else NO_TERM_BELOW
    t = y + ROUND_MAGIC
    f = y - (t - ROUND_MAGIC)
    p = multiply_add(multiply_add(multiply_add(multiply_add(multiply_add(P5, f, P4), f, P3), f, P2), f, P1), f, P0)
    exponent = I32(F32(t).view(np.int32) << I32(23))  # the magic number is 0 in its nine lowest bits
    return I32(F32(p).view(np.int32) + exponent).view(np.float32)


@kernel
def rough_sum(part: Any, largest: np.float32, scale: np.float32) -> np.float32:
    """The sum of 2^((l - largest) * scale) over at most PART logits."""
    total = F32(0)
    for i in range(part.size):
        total = add_in_any_order(total, rough_term(bits_of(part[i]), largest, scale))
    return total


@kernel
def rough_mass(block: Any, largest: np.float32, scale: np.float32) -> np.float64:
    """The sum of 2^((l - largest) * scale) over a block."""
    total = F64(0)
    for begin in range(0, block.size, PART):
        total += F64(rough_sum(block[begin : begin + PART], largest, scale))
    return total


@kernel
def bound_masses(
    row: Any, maxima: Any, maximum: np.float32, reciprocal: np.float32, out: Any
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """(low, high, sum of out): the mass of the row is in low .. high. out: uint64 [B], about the mass of each block."""
    total, error, told, raw = F64(0), F64(0), U64(0), raw_of(row)
    scale = F32(reciprocal * LOG2_E)
    for b in range(maxima.size):
        largest = logit_of_key(maxima[b])
        s = (largest - maximum) * reciprocal
        out[b] = U64(0)
        if s < NO_MASS_BELOW:
            continue
        if is_touched(row, b):
            block = block_of(row, b)  # which settles a maximum that was a bound; the error needs the largest token
            largest = logit_of_key(maxima[b])
            s = (largest - maximum) * reciprocal
            terms = rough_mass(block, largest, scale)
        else:
            terms = rough_mass(raw[b * BLOCK : (b + 1) * BLOCK], largest, scale)
        mass = terms * F64(exp32(s)) * TWO_40
        out[b] = U64(I64(mass))
        told += out[b]
        total += mass
        error += mass * (ERROR + ERROR_OF_S * (LN_OF_BLOCK - F64(s)))
    low = total - error - F64(width_of(row))  # q itself is rounded down
    return U64(I64(max(low, F64(1)))), U64(I64(total + error)), told


@kernel
def lower(key: np.int32, by: np.float32) -> np.int32:
    """The key of a logit that is lower, above -inf."""
    logit = F32(logit_of_key(key) - by)
    return max(flush_key(key_of_bits(logit.view(np.int32))), ALL_ALIVE)


@kernel
def is_flat(
    maxima: Any, top_p: np.uint64, maximum: np.float32, reciprocal: np.float32, spare: Any, weights: Any
) -> bool:
    """Whether so much of the row is near its largest logit that listing what is kept does not pay.

    It is guessed from the largest token of each block: three of four blocks are needed for P of their mass.
    """
    if maxima.size < FLAT_BLOCKS:
        return False
    spare[: maxima.size] = maxima
    mass = fill_masses(maxima, maxima.size, maximum, reciprocal, weights)
    least, _ = select(spare, weights, maxima.size, needed_mass(mass, top_p))
    reached = 0
    for b in range(maxima.size):
        reached += maxima[b] >= least
    return bool(4 * reached > 3 * maxima.size)


@kernel
def list_heaviest(
    row: Any, maxima: Any, top_p: np.uint64, told: np.uint64, need: np.uint64, maximum: np.float32,
    reciprocal: np.float32, keys: Any, ids: Any, spare: Any, weights: Any,
) -> int:  # fmt: skip
    """List the tokens from some key on that weigh `need` together; UNLISTED where that may be a large part of the row.

    weights: about the mass of each block, `told` together. The key is looked for below the maxima of the blocks that
    carry P of the mass, one unit of s after the other.
    """
    spare[: maxima.size] = maxima
    start, _ = select(spare, weights, maxima.size, needed_mass(told, top_p))
    most = max(width_of(row) >> 4, 4 * BLOCK)
    for step in range(1, 5):
        n = gather_most(row, maxima, lower(start, F32(step) / reciprocal), most, keys, ids)
        if n > most:
            break
        if fill_masses(keys, n, maximum, reciprocal, weights) >= need:
            return n
    return UNLISTED


@kernel
def keep_between(
    keys: Any, ids: Any, n: int, low: np.uint64, high: np.uint64, maximum: np.float32, reciprocal: np.float32,
    spare: Any, weights: Any,
) -> int:  # fmt: skip
    """Cut n listed tokens where their mass reaches `low`, if it reaches `high` at the same token; UNSURE if not."""
    for i in range(n):
        spare[i] = keys[i]
    threshold, above = select(spare, weights, n, high)
    q = mass_of_key(threshold, maximum, reciprocal)
    ties = (high - above + q - ONE) // q
    if low <= above or (low - above + q - ONE) // q != ties:
        return UNSURE
    return int(keep_above(keys, ids, n, threshold, I64(ties)))


@kernel
def keep_top_p(
    row: Any, maxima: Any, top: np.int32, top_p: np.uint64, reciprocal: np.float32, keys: Any, ids: Any, spare: Any,
    weights: Any,
) -> tuple[int, np.int32, int, int]:  # fmt: skip
    """The cut of top-p over a whole row. top: its largest key."""
    maximum = logit_of_key(top)
    if is_flat(maxima, top_p, maximum, reciprocal, spare, weights):
        return cut_flat(row, maxima, top, top_p, reciprocal, keys, spare, weights)
    low, high, told = bound_masses(row, maxima, maximum, reciprocal, weights)
    high = needed_mass(high, top_p)
    n = list_heaviest(row, maxima, top_p, told, high, maximum, reciprocal, keys, ids, spare, weights)
    if n == UNLISTED:
        return cut_flat(row, maxima, top, top_p, reciprocal, keys, spare, weights)
    left = keep_between(keys, ids, n, needed_mass(low, top_p), high, maximum, reciprocal, spare, weights)
    if left == UNSURE:
        need = needed_mass(block_masses(row, maxima, maximum, reciprocal, weights), top_p)
        fill_masses(keys, n, maximum, reciprocal, weights)
        left = keep_nucleus(keys, ids, n, need, maximum, reciprocal, spare, weights)
    return left, ALL_ALIVE, -1, left


@kernel
def key_at_mass(
    keys: Any, n: int, need: np.uint64, maximum: np.float32, reciprocal: np.float32, spare: Any, weights: Any
) -> np.int32:
    """The largest key t such that n keys, those >= t, weigh `need`."""
    spare[:n] = keys[:n]
    fill_masses(keys, n, maximum, reciprocal, weights)
    return I32(select(spare, weights, n, need)[0])


@kernel
def bracket(
    row: Any, maxima: Any, top: np.int32, top_p: np.uint64, margin: np.float64, reciprocal: np.float32, keys: Any,
    spare: Any, weights: Any,
) -> tuple[np.int32, np.int32]:  # fmt: skip
    """Two keys, between which P of the mass probably ends, from the first few tokens of every block.

    Mass up to a key is estimated with a variance of P * (1 - P) * (sum of q^2) / (sum of q)^2 of the sample.
    """
    n, maximum, squares = 0, logit_of_key(top), F64(0)
    for b in range(maxima.size):
        block = block_of(row, b)
        for i in range(min(SAMPLED, block.size)):
            keys[n] = flush_key(key_of_bits(bits_of(block[i])))
            n += 1
    mass = F64(I64(fill_masses(keys, n, maximum, reciprocal, weights)))
    for i in range(n):
        squares += F64(I64(weights[i])) ** 2
    share = F64(I64(top_p)) * TWO_M32
    slack = margin * np.sqrt(share * (F64(1) - share) * squares)
    before, after = mass * share - slack, mass * share + slack
    low, high = ALL_ALIVE, top
    if F64(1) < before:
        high = key_at_mass(keys, n, U64(I64(before)), maximum, reciprocal, spare, weights)
    if F64(1) < after < mass:
        low = key_at_mass(keys, n, U64(I64(after)), maximum, reciprocal, spare, weights)
    return low, high


@kernel
def masses_above(
    block: Any, key: np.int32, maximum: np.float32, reciprocal: np.float32
) -> tuple[np.uint64, np.uint64, int]:
    """The mass of a block, and mass and number of its tokens with a larger key; summed as in `mass_of_block`."""
    high, low, high_above, low_above, above = I32(0), I32(0), I32(0), I32(0), I32(0)
    for i in range(block.size):
        bits = flush(bits_of(block[i]))
        w = exp32((I32(bits).view(np.float32) - maximum) * reciprocal) * TWO_20
        h = I32(w)
        rest = I32((w - F32(h)) * TWO_20)
        is_above = key_of_bits(bits) > key
        high, low = I32(high + h), I32(low + rest)
        high_above = I32(high_above + (h if is_above else I32(0)))
        low_above = I32(low_above + (rest if is_above else I32(0)))
        above = I32(above + I32(is_above))
    return (U64(high) << U64(20)) + U64(low), (U64(high_above) << U64(20)) + U64(low_above), above


@kernel
def list_between(block: Any, low: np.int32, end: np.int32, keys: Any) -> int:
    """List the keys from `low` up to, not with, `end` (both unflushed) of a block; return how many."""
    left, whole = 0, block.size // LANES * LANES
    for begin in range(0, whole, LANES):
        mask = U32(keys_at_least(block, begin, low) & ~keys_at_least(block, begin, end))
        while mask != U32(0):
            keys[left] = flush_key(key_of_bits(bits_of(block[begin + lowest_bit(mask)])))
            left += 1
            mask = U32(mask & (mask - U32(1)))
    for i in range(whole, block.size):
        key = key_of_bits(bits_of(block[i]))
        if low <= key < end:
            keys[left] = flush_key(key)
            left += 1
    return left


@kernel
def weigh_around(
    row: Any, maxima: Any, low: np.int32, high: np.int32, maximum: np.float32, reciprocal: np.float32, keys: Any
) -> tuple[np.uint64, np.uint64, int, int]:
    """(mass of the row, mass and number of tokens above `high`, how many keys in low .. high are listed).

    Blocks without mass are left out of all four: no token of them can reach a mass that is needed.
    """
    mass, above, num_above, n = U64(0), U64(0), 0, 0
    first, end = unflushed(low), unflushed(I32(high + I32(1)))
    for b in range(maxima.size):
        if (logit_of_key(maxima[b]) - maximum) * reciprocal < NO_MASS_BELOW:
            continue
        block = block_of(row, b)
        q, q_above, count = masses_above(block, high, maximum, reciprocal)
        mass, above, num_above = mass + q, above + q_above, num_above + count
        if maxima[b] >= low:
            n += list_between(block, first, end, keys[n:])
    return mass, above, num_above, n


@kernel
def nth_id(row: Any, maxima: Any, key: np.int32, nth: int) -> int:
    """The id of the nth token, from 1 on, that has a key. Requires that there are as many."""
    low, end = unflushed(key), unflushed(I32(key + I32(1)))
    for b in range(maxima.size):
        if maxima[b] < key:
            continue
        block = block_of(row, b)
        whole = block.size // LANES * LANES
        for begin in range(0, whole, LANES):
            mask = U32(keys_at_least(block, begin, low) & ~keys_at_least(block, begin, end))
            if num_bits(mask) < nth:
                nth -= num_bits(mask)
                continue
            for _ in range(nth - 1):
                mask = U32(mask & (mask - U32(1)))
            return b * BLOCK + begin + lowest_bit(mask)
        for i in range(whole, block.size):
            nth -= low <= key_of_bits(bits_of(block[i])) < end
            if nth == 0:
                return b * BLOCK + i
    return -1


@kernel
def cut_flat(
    row: Any, maxima: Any, top: np.int32, top_p: np.uint64, reciprocal: np.float32, keys: Any, spare: Any, weights: Any
) -> tuple[int, np.int32, int, int]:
    """The cut of top-p over any whole row, unlisted. Where the sample misled, the bracket is made wider, then whole."""
    maximum = logit_of_key(top)
    for margin in MARGINS:
        low, high = ALL_ALIVE, top
        if margin > 0:
            low, high = bracket(row, maxima, top, top_p, margin, reciprocal, keys, spare, weights)
        mass, above, num_above, n = weigh_around(row, maxima, low, high, maximum, reciprocal, keys)
        need = needed_mass(mass, top_p)
        if above < need <= above + fill_masses(keys, n, maximum, reciprocal, weights):
            break
    spare[:n] = keys[:n]
    key, more = select(spare, weights, n, need - above)
    q = mass_of_key(key, maximum, reciprocal)
    ties = I64((need - above - more + q - ONE) // q)
    kept = num_above + ties
    for i in range(n):
        kept += keys[i] > key
    return UNLISTED, key, nth_id(row, maxima, key, ties), kept
