"""top-n-sigma, epsilon, eta and top-a for Numba: each is a least key, found without sorting or listing the row.

What a filter leaves is every token from a key on, so the next one sums over the row from that key on; blocks whose
largest key is below it are skipped. Tests on q or on distances are monotone in the key, so bisection finds the border.
One more answer than keys: above the largest key means that only the first token stays. Agreement: *set*.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from klero.device import inline, kernel
from klero.lots.mass.cpu import F32, I32, I64, KEY_NEG_INF, TWO_20, U64, flush, key_of_bits
from klero.lots.pinned.cpu import ZERO, exp32, log32
from klero.rows.lanes import bits_of
from klero.rows.select.cpu import ALL_ALIVE, logit_of_key, mass_of_key
from klero.rows.view.cpu import BITS_NEG_INF, BLOCK, block_of, flush_key
from klero.sampling.filters.cpu import needed_mass

F64 = np.float64
LARGEST = F32(np.finfo(np.float32).max)
NO_SURPRISE_BELOW = F32(-40)  # w * -s is below 2^-40 from here on
TWO_32, TWO_48, TWO_M40 = F64(2.0**32), F64(2.0**48), F32(2.0**-40)
U32, KEY_MAX = np.uint32, I32(0x7FFFFFFF)
LOW_10, TINY_COUNTS_BELOW = I32(1023), F32(2.0**-32)
STRETCH = 4  # blocks of a plain row whose sums are joined at once; 1024 * 2^20 stays in 32 bits
NEGATIVE, NONE_BANNED = U32(2**31), U32(0xFF800000)


@inline
def distance(maximum: np.float32, logit: np.float32) -> np.float32:
    """m - l, the largest finite value where it overflows."""
    d = maximum - logit
    return d if d < LARGEST else LARGEST


@kernel
def search_least(row: Any, maxima: Any) -> tuple[np.int32, int]:
    """The least key above that of -inf, and the number of tokens above it."""
    least, alive = KEY_MAX, 0
    for b in range(maxima.size):
        block = block_of(row, b)
        low, banned = KEY_MAX, I32(0)
        for i in range(block.size):
            key = key_of_bits(bits_of(block[i]))
            gone = key <= KEY_NEG_INF
            banned = I32(banned + I32(gone))
            low = min(low, KEY_MAX if gone else key)
        least = min(least, low)
        alive += block.size - banned
    return flush_key(least), alive


def least_and_alive(row: Any, maxima: Any, widest: Any) -> Any:
    """What `search_least` finds. widest: the largest raw bits of a plain row, which often tell it."""
    raise RuntimeError("least_and_alive is for kernels")


@overload(least_and_alive, strict=False)
def _least_and_alive(row: Any, maxima: Any, widest: Any) -> Any:
    if not isinstance(row, types.Array):  # of a rewritten row `widest` is a bound
        return lambda row, maxima, widest: search_least(row, maxima)

    def of_plain(row: Any, maxima: Any, widest: Any) -> Any:
        if widest >= NEGATIVE and widest < NONE_BANNED:
            return flush_key(key_of_bits(I32(widest))), row.size
        return search_least(row, maxima)

    return of_plain


def step_of(row: Any) -> int:
    """How many blocks `stretch_of` reads at once."""
    raise RuntimeError("step_of is for kernels")


@overload(step_of, strict=False)
def _step_of(row: Any) -> Any:
    return (lambda row: STRETCH) if isinstance(row, types.Array) else (lambda row: 1)


def stretch_of(row: Any, b: int) -> Any:
    """The logits of `step_of` blocks from b on."""
    raise RuntimeError("stretch_of is for kernels")


@overload(stretch_of, strict=False)
def _stretch_of(row: Any, b: int) -> Any:
    if isinstance(row, types.Array):
        return lambda row, b: row[b * BLOCK : (b + STRETCH) * BLOCK]
    return lambda row, b: block_of(row, b)


@inline
def squares_of_halves(high: np.int32, cross: np.int32, low: np.int32) -> np.uint64:
    """The sum of u^2 from those of h^2, h * l and l^2, u = h * 2^10 + l."""
    return (U64(high) << U64(20)) + (U64(cross) << U64(11)) + U64(low)


@kernel
def sums_of_all(row: Any, maxima: Any, maximum: np.float32, scale: np.float32) -> tuple[np.uint64, np.uint64]:
    """As `sums_of_alive`, where no token is banned, no distance overflows and tiny logits make no difference."""
    sum_u, sum_squares = U64(0), U64(0)
    for b in range(0, maxima.size, step_of(row)):
        block = stretch_of(row, b)
        part, high, cross, low = I32(0), I32(0), I32(0), I32(0)
        for i in range(block.size):
            u = I32((maximum - I32(bits_of(block[i])).view(np.float32)) * scale)
            h, rest = I32(u >> I32(10)), I32(u & LOW_10)
            part = I32(part + u)
            high, cross, low = I32(high + h * h), I32(cross + h * rest), I32(low + rest * rest)
        sum_u += U64(part)
        sum_squares += squares_of_halves(high, cross, low)
    return sum_u, sum_squares


@kernel
def sums_of_alive(row: Any, maxima: Any, maximum: np.float32, scale: np.float32) -> tuple[np.uint64, np.uint64]:
    """The sums of u and of u^2, u = floor(d * scale) below 2^20, over the tokens above -inf.

    u is split into two halves of 10 bits, so that the sums of a block stay in 32 bits and vectorise.
    """
    sum_u, sum_squares = U64(0), U64(0)
    for b in range(maxima.size):
        block = block_of(row, b)
        part, high, cross, low = I32(0), I32(0), I32(0), I32(0)
        for i in range(block.size):
            bits = flush(bits_of(block[i]))
            d = distance(maximum, I32(bits).view(np.float32))
            u = I32((d if bits != BITS_NEG_INF else ZERO) * scale)
            h, rest = I32(u >> I32(10)), I32(u & LOW_10)
            part = I32(part + u)
            high, cross, low = I32(high + h * h), I32(cross + h * rest), I32(low + rest * rest)
        sum_u += U64(part)
        sum_squares += squares_of_halves(high, cross, low)
    return sum_u, sum_squares


@kernel
def n_sigma_key(row: Any, maxima: Any, top: np.int32, widest: np.uint32, n: np.float32) -> np.int32:
    """The least key within n standard deviations of the largest."""
    maximum = logit_of_key(top)
    least, alive = least_and_alive(row, maxima, widest)
    largest = distance(maximum, logit_of_key(least))
    if largest == ZERO:
        return ALL_ALIVE
    k = I32(19) - ((F32(largest).view(np.int32) >> I32(23)) - I32(127))
    scale = I32((k + I32(127)) << I32(23)).view(np.float32)
    # a logit below 2^-64 is lost beside a maximum of 2^-39 or more, flushed or not
    if widest < NONE_BANNED and largest < LARGEST and abs(maximum) > TINY_COUNTS_BELOW:
        sum_u, sum_squares = sums_of_all(row, maxima, maximum, scale)
    else:
        sum_u, sum_squares = sums_of_alive(row, maxima, maximum, scale)
    count = F64(alive)
    mean = F64(I64(sum_u)) / count
    variance = max(F64(I64(sum_squares)) / count - mean * mean, 0.0)
    limit = F32(F64(n) * np.sqrt(variance) / F64(scale))
    low, high = I64(KEY_NEG_INF), I64(top)  # low fails, high holds (its distance is 0)
    while high - low > 1:
        middle = (low + high) >> 1
        if distance(maximum, logit_of_key(I32(middle))) <= limit:
            high = middle
        else:
            low = middle
    return I32(high)


@kernel
def mass_from(row: Any, maxima: Any, least: np.int32, maximum: np.float32, reciprocal: np.float32) -> np.uint64:
    """The mass of all tokens with key >= least."""
    total = U64(0)
    for b in range(maxima.size):
        if maxima[b] < least or (logit_of_key(maxima[b]) - maximum) * reciprocal < NO_SURPRISE_BELOW:
            continue
        block = block_of(row, b)
        high, low = I32(0), I32(0)
        for i in range(block.size):
            bits = flush(bits_of(block[i]))
            w = exp32((I32(bits).view(np.float32) - maximum) * reciprocal)
            w = (w if key_of_bits(bits) >= least else ZERO) * TWO_20
            h = I32(w)
            high = I32(high + h)
            low = I32(low + I32((w - F32(h)) * TWO_20))
        total += (U64(high) << U64(20)) + U64(low)
    return total


@kernel
def surprise_from(
    row: Any, maxima: Any, least: np.int32, maximum: np.float32, reciprocal: np.float32
) -> tuple[np.uint64, np.uint64]:
    """The mass and the sum of floor(w * -s * 2^40) of all tokens with key >= least."""
    mass, surprise = U64(0), U64(0)
    for b in range(maxima.size):
        if maxima[b] < least or (logit_of_key(maxima[b]) - maximum) * reciprocal < NO_SURPRISE_BELOW:
            continue
        block = block_of(row, b)
        high, low, more, less = I32(0), I32(0), I32(0), I32(0)
        for i in range(block.size):
            bits = flush(bits_of(block[i]))
            s = (I32(bits).view(np.float32) - maximum) * reciprocal
            w = exp32(s) if key_of_bits(bits) >= least else ZERO
            term = (w * -s if w > ZERO else ZERO) * TWO_20
            w = w * TWO_20
            h, k = I32(w), I32(term)
            high, more = I32(high + h), I32(more + k)
            low = I32(low + I32((w - F32(h)) * TWO_20))
            less = I32(less + I32((term - F32(k)) * TWO_20))
        mass += (U64(high) << U64(20)) + U64(low)
        surprise += (U64(more) << U64(20)) + U64(less)
    return mass, surprise


@kernel
def entropy(mass: np.uint64, surprise: np.uint64) -> tuple[np.float32, np.float32]:
    """lse(Q) and H in nats. mass, surprise: Q and the sum of floor(w * -s * 2^40)."""
    masses = F32(I64(mass))
    level = log32(masses * TWO_M40)
    return level, level + F32(I64(surprise)) / masses


@kernel
def eta_bound(mass: np.uint64, surprise: np.uint64, least: np.float32) -> np.uint64:
    """floor(min(e, sqrt(e) * exp(-H)) * 2^32)."""
    _, h = entropy(mass, surprise)
    bound = F32(np.sqrt(least)) * exp32(-h)
    return U64(I64(F64(min(least, bound)) * TWO_32))


@kernel
def top_a_need(mass: np.uint64, a: np.uint64) -> np.uint64:
    """The least integer q >= a * 2^48 / Q, the quotient in binary64."""
    return U64(I64(np.ceil(F64(I64(a)) * TWO_48 / F64(I64(mass)))))


@kernel
def mass_key(least: np.int32, top: np.int32, maximum: np.float32, reciprocal: np.float32, need: np.uint64) -> np.int32:
    """The least key from `least` on whose mass is at least `need`; top + 1 where not even the largest has it."""
    low, high = I64(least) - 1, I64(top) + 1  # low fails, high holds
    while high - low > 1:
        middle = (low + high) >> 1
        if mass_of_key(I32(middle), maximum, reciprocal) >= need:
            high = middle
        else:
            low = middle
    return I32(high)


@kernel
def least_kept(row: Any, maxima: Any, top: np.int32, widest: np.uint32, p: Any) -> np.int32:
    """The least key that top-n-sigma, epsilon, eta and top-a leave, in this order; top + 1: only the first token."""
    maximum, least = logit_of_key(top), ALL_ALIVE
    if p.top_n_sigma > ZERO:
        least = n_sigma_key(row, maxima, top, widest, p.top_n_sigma)
    if p.epsilon > U64(0) and least <= top:
        mass = mass_from(row, maxima, least, maximum, p.reciprocal)
        least = mass_key(least, top, maximum, p.reciprocal, needed_mass(mass, p.epsilon))
    if p.eta > ZERO and least <= top:
        mass, surprise = surprise_from(row, maxima, least, maximum, p.reciprocal)
        need = needed_mass(mass, eta_bound(mass, surprise, p.eta))
        least = mass_key(least, top, maximum, p.reciprocal, need)
    if p.top_a > U64(0) and least <= top:
        mass = mass_from(row, maxima, least, maximum, p.reciprocal)
        least = mass_key(least, top, maximum, p.reciprocal, top_a_need(mass, p.top_a))
    return least
