"""Block maxima for Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import key_of_bits
from klero.rows.lanes import bits_of
from klero.rows.view.cpu import BLOCK, KEY_MIN, block_of, flush_key, largest_of_block

U32 = np.uint32


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
        largest, bits_most = largest_of_block(row[b * BLOCK : (b + 1) * BLOCK])
        maxima[b] = flush_key(largest)
        top = largest if largest > top else top
        widest = bits_most if bits_most > widest else widest
    return top, widest


@kernel
def lowest_id(row: Any, maxima: Any, key: np.int32) -> int:
    """The lowest id whose key is the row's largest: the greedy token."""
    for b in range(maxima.size):
        if maxima[b] == key:
            block = block_of(row, b)
            for i in range(block.size):
                if flush_key(key_of_bits(bits_of(block[i]))) == key:
                    return b * BLOCK + i
    return -1
