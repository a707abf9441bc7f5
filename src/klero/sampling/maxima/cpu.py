"""Block maxima for Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from klero.device import inline, kernel
from klero.lots.mass.cpu import I32, KEY_NEG_INF, KEY_POS_INF, TINY, key_of_bits

U32 = np.uint32
BLOCK = 256
KEY_MIN = I32(-(2**31))
BITS_NEG_INF = U32(0xFF800000)


def bits_of(raw: Any) -> Any:
    """The binary32 bits of one stored logit: float32 bits as they are, bfloat16 bits shifted."""
    raise RuntimeError("bits_of is for kernels")


@overload(bits_of, strict=False)
def _bits_of(raw: Any) -> Any:
    if isinstance(raw, types.Integer) and raw.bitwidth == 16:
        return lambda raw: I32(I32(raw) << I32(16))
    return lambda raw: I32(raw)


@inline
def flush_key(key: np.int32) -> np.int32:
    """The key of a logit once |l| < 2^-64 is +0."""
    return I32(0) if -TINY <= key < TINY else key


@kernel
def largest_key(block: Any) -> np.int32:
    """The largest key of a few tokens."""
    largest = KEY_MIN
    for i in range(block.size):
        key = key_of_bits(bits_of(block[i]))
        largest = key if key > largest else largest
    return flush_key(largest)


@kernel
def block_maxima(row: Any, maxima: Any) -> tuple[np.int32, np.uint32]:
    """Fill the largest key of each block; return the largest key and the largest raw bits."""
    top, widest = KEY_MIN, U32(0)
    for b in range(maxima.size):
        block = row[b * BLOCK : (b + 1) * BLOCK]
        largest, bits_most = KEY_MIN, U32(0)
        for i in range(block.size):
            bits = bits_of(block[i])
            key = key_of_bits(bits)
            largest = key if key > largest else largest
            bits_most = U32(bits) if U32(bits) > bits_most else bits_most
        maxima[b] = flush_key(largest)
        top = largest if largest > top else top
        widest = bits_most if bits_most > widest else widest
    return top, widest


@kernel
def is_bad(top: np.int32, widest: np.uint32) -> bool:
    """Whether the row holds +inf or NaN of either sign."""
    return bool(top >= KEY_POS_INF or widest > BITS_NEG_INF)


@kernel
def num_alive(row: Any, widest: np.uint32) -> int:
    """Tokens with l > -inf; a row without -inf is not read again."""
    if widest < BITS_NEG_INF:
        return int(row.size)
    count = 0
    for i in range(row.size):
        count += key_of_bits(bits_of(row[i])) > KEY_NEG_INF
    return count


@kernel
def lowest_id(row: Any, maxima: Any, key: np.int32) -> int:
    """The lowest id whose key is the row's largest: the greedy token."""
    for b in range(maxima.size):
        if maxima[b] == key:
            block = row[b * BLOCK : (b + 1) * BLOCK]
            for i in range(block.size):
                if flush_key(key_of_bits(bits_of(block[i]))) == key:
                    return b * BLOCK + i
    return -1
