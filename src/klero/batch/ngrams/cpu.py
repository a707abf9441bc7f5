"""N-grams for Numba. A position stands for the size - 1 tokens before it; index and chains hold it + 1, 0 for none.

What holds between calls: the part of the index in use is what comes of adding the positions to empty places in their
order. So no search for a chain passes the place of one that began later, and to take the newest position back is to put
the one before it, or nothing, in its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import inline, kernel

U32 = np.uint32


@kernel
def hash_before(history: Any, position: int, size: int) -> np.uint32:
    """A hash of the size - 1 tokens before a position (FNV-1a by words, and a mix of the high bits)."""
    h = U32(2166136261)
    for i in range(position - size + 1, position):
        h = U32(U32(h ^ U32(history[i])) * U32(16777619))
    return U32(U32(h ^ (h >> U32(15))) * U32(0x9E3779B9))


@inline
def same_before(history: Any, position: int, other: int, size: int) -> bool:
    """Whether two positions have the same size - 1 tokens before them."""
    i = 1
    while i < size and history[position - i] == history[other - i]:
        i += 1
    return i >= size


@kernel
def find(history: Any, position: int, size: int, index: Any, log2_used: int) -> int:
    """The place in the index of the tokens before a position, or the empty place where they belong."""
    mask = (1 << log2_used) - 1
    place = np.int64(hash_before(history, position, size) >> U32(32 - log2_used))
    while index[place] != 0 and not same_before(history, position, index[place] - 1, size):
        place = (place + 1) & mask
    return place


@kernel
def grow(index: Any, log2_used: Any, history: Any, size: int, length: int) -> None:
    """Double the part of the index that is in use, whatever the new places hold. length: positions below are added."""
    log2_used[0] += 1
    index[: 1 << log2_used[0]] = 0
    for position in range(size - 1, length):  # in their order: see above; the newest of a chain is written last
        index[find(history, position, size, index, log2_used[0])] = position + 1


@kernel
def add_positions(
    index: Any, num_used: Any, log2_used: Any, previous: Any, history: Any, size: int, begin: int, end: int
) -> None:
    """Add positions begin .. end - 1, whose tokens the history has. num_used, log2_used: int32 [1]."""
    for position in range(max(begin, size - 1), end):
        place = find(history, position, size, index, log2_used[0])
        if index[place] == 0:
            if 2 * (num_used[0] + 1) > 1 << log2_used[0]:
                grow(index, log2_used, history, size, position)
                place = find(history, position, size, index, log2_used[0])
            num_used[0] += 1
        previous[position] = index[place]
        index[place] = position + 1


@kernel
def append_positions(
    index: Any, num_used: Any, log2_used: Any, previous: Any, history: Any, sizes: Any, lengths: Any, slots: Any
) -> None:
    """Add the newest position of each of several slots; arrays [S, ...]."""
    for k in range(slots.size):
        s = slots[k]
        add_positions(
            index[s], num_used[s : s + 1], log2_used[s : s + 1], previous[s], history[s],
            sizes[s], lengths[s] - 1, lengths[s],
        )  # fmt: skip


@kernel
def remove_positions(
    index: Any, num_used: Any, log2_used: Any, previous: Any, history: Any, size: int, length: int, shorter: int
) -> None:
    """Take positions length - 1 down to `shorter` back. A chain that ends with one frees its place."""
    for position in range(length - 1, max(shorter, size - 1) - 1, -1):
        place = find(history, position, size, index, log2_used[0])
        index[place] = previous[position]
        num_used[0] -= previous[position] == 0


@kernel
def newest(history: Any, length: int, size: int, index: Any, log2_used: int) -> int:
    """The newest position whose size - 1 tokens before it are the last ones of the history; -1 for none.

    The next one of the chain is previous[position] - 1.
    """
    if length < size - 1:
        return -1
    return index[find(history, length, size, index, log2_used)] - 1
