"""Scratch of the kernels: one buffer for each thread, which grows to the widest row it met and lives as it does.

3.6 MB for rows of 128,256 tokens, 118 MB for the widest. Kernels carve it; what they find in it means nothing. Only
lists of logprobs, typical-p and sorted lists of `topk` allocate beside it, by what they list.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.device import kernel
from klero.rows.lanes import LANES
from klero.rows.select.cpu import BUCKETS
from klero.rows.view.cpu import BLOCK

CHUNK = 4 * BLOCK  # tokens whose words are made at a time
NUM_WORDS = CHUNK + 8 + LANES  # and up to four behind each end, and what is compared past them

_own = threading.local()


def size_of(width: int) -> int:
    """How many 64-bit words the scratch for rows of a width takes."""
    blocks = -(-width // BLOCK)
    lists, of_view = 3 * (width + 1) + blocks + NUM_WORDS, blocks + 2 * blocks * BLOCK + 2 + blocks
    return width + 1 + BUCKETS + (lists + of_view + 1) // 2


def room_of(width: int) -> npt.NDArray[np.uint64]:
    """The buffer of this thread, for rows of a width."""
    room: npt.NDArray[np.uint64] | None = getattr(_own, "room", None)
    if room is None or room.size < size_of(width):
        room = _own.room = np.empty(size_of(width), np.uint64)
    return room


def in_room(run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that takes (room, rows, width, ...) as a function of (rows, width, ...), in the room of its thread."""

    @functools.wraps(run)
    def run_in_room(rows: Any, width: int, *rest: Any) -> Any:
        return run(room_of(width), rows, width, *rest)

    return run_in_room


@kernel
def carve(room: Any, width: int) -> Any:
    """(maxima, keys, ids, spare, weights, words) for a row of a width, and what is left of the buffer, int32."""
    size, blocks = width + 1, (width + BLOCK - 1) // BLOCK
    weights, rest = room[: size + BUCKETS], room[size + BUCKETS :].view(np.int32)
    keys, ids, spare, rest = rest[:size], rest[size : 2 * size], rest[2 * size : 3 * size], rest[3 * size :]
    maxima, words = rest[:blocks], rest[blocks : blocks + NUM_WORDS].view(np.uint32)
    return (maxima, keys, ids, spare, weights, words), rest[blocks + NUM_WORDS :]


@kernel
def carve_for_view(rest: Any, width: int) -> Any:
    """(starts, copy, state) of a view of a row, and the block maxima of the model's row. rest: from `carve`."""
    blocks = (width + BLOCK - 1) // BLOCK
    end = blocks + 2 * blocks * BLOCK
    return (rest[:blocks], rest[blocks:end], rest[end : end + 2]), rest[end + 2 : end + 2 + blocks]
