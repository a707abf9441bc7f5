"""Counts for Numba: open addressing over compact entries. Arrays [S, ...] as in `Counts`, s: the slot.

What holds between calls: the part of the index in use is what comes of putting the entries into empty places in their
order. So no search for an older entry passes the place of the newest one, and to take that out is to empty its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import inline, kernel

U32, I32 = np.uint32, np.int32
GOLDEN = U32(0x9E3779B9)  # 2^32 / golden ratio: spreads consecutive ids


@inline
def place_of(token_id: np.int32, log2_used: np.int32) -> int:
    """Where the search for an id begins."""
    return np.int64(U32(U32(token_id) * GOLDEN) >> U32(I32(32) - log2_used))


@inline
def find(ids: Any, index: Any, log2_used: Any, s: int, token_id: np.int32) -> int:
    """The place of an id in the index, or the empty place where it belongs."""
    mask = (1 << log2_used[s]) - 1
    place = place_of(token_id, log2_used[s])
    while index[s, place] != 0 and ids[s, index[s, place] - 1] != token_id:
        place = (place + 1) & mask
    return place


@kernel
def grow(ids: Any, num_entries: Any, index: Any, log2_used: Any, s: int) -> None:
    """Double the part of the index that is in use, whatever the new places hold."""
    log2_used[s] += 1
    index[s, : 1 << log2_used[s]] = 0
    for entry in range(num_entries[s]):  # in their order: see above
        index[s, find(ids, index, log2_used, s, ids[s, entry])] = entry + 1


@inline
def add_token(
    ids: Any, counts: Any, num_entries: Any, index: Any, log2_used: Any, s: int, token_id: np.int32, weight: int
) -> None:
    """Take one occurrence, which counts `weight`: 0 or 1."""
    place = find(ids, index, log2_used, s, token_id)
    if index[s, place] == 0:
        if 2 * (num_entries[s] + 1) > 1 << log2_used[s]:
            grow(ids, num_entries, index, log2_used, s)
            place = find(ids, index, log2_used, s, token_id)
        ids[s, num_entries[s]], counts[s, num_entries[s]] = token_id, 0
        num_entries[s] += 1
        index[s, place] = num_entries[s]
    counts[s, index[s, place] - 1] += weight


@kernel
def add_tokens(
    ids: Any, counts: Any, num_entries: Any, index: Any, log2_used: Any, s: int, token_ids: Any, counted_from: int
) -> None:
    """Take many in one slot; those from place `counted_from` on count."""
    for i in range(token_ids.size):
        add_token(ids, counts, num_entries, index, log2_used, s, token_ids[i], 1 if i >= counted_from else 0)


@kernel
def append_tokens(
    ids: Any, counts: Any, num_entries: Any, index: Any, log2_used: Any, slots: Any, token_ids: Any
) -> None:
    """Take one in each of several slots. No slice of a slot is made here: counting its references costs more than the
    rest."""
    for k in range(slots.size):
        add_token(ids, counts, num_entries, index, log2_used, slots[k], token_ids[k], 1)


@kernel
def remove_tokens(
    ids: Any, counts: Any, num_entries: Any, index: Any, log2_used: Any, s: int, token_ids: Any, num_prompt: int
) -> int:
    """Take occurrences in the output back, the last first. Return -1, or where the first one is that does not count.

    The first occurrence of an id is the last one to leave. Unless the prompt has the id too, its entry leaves with it,
    and is the newest by then: whatever came after it has left.
    """
    for i in range(token_ids.size - 1, -1, -1):
        place = find(ids, index, log2_used, s, token_ids[i])
        entry = index[s, place] - 1
        if entry < 0 or counts[s, entry] == 0:
            return i
        counts[s, entry] -= 1
        if counts[s, entry] == 0 and entry >= num_prompt:
            index[s, place] = 0
            num_entries[s] = entry
    return -1
