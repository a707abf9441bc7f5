"""One wide row over several threads: each reads a part of it, and where tokens draw unlisted, each draws from a part.

Parts merge by maximum, and the better score wins, so the token is that of `sample_rows`. Agreement: *bits* of the
block maxima, *token*.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel, over_rows
from klero.rows.maxima.cpu import block_maxima
from klero.rows.room import carve, in_room
from klero.rows.select.cpu import logit_of_key
from klero.rows.view.cpu import BLOCK
from klero.sampling.draw.cpu import draw_likeliest, draw_others
from klero.sampling.filters.nucleus.cpu import UNLISTED
from klero.sampling.fused.cpu import cut_row


@kernel
def read_part(rows: Any, width: int, r: int, begin: int, end: int, maxima: Any, found: Any) -> None:
    """The blocks begin .. end - 1 of a row: their maxima, and in found[begin] their largest key and raw bits, int64."""
    row = rows[r][:width][begin * BLOCK : end * BLOCK]
    found[begin, 0], found[begin, 1] = block_maxima(row, maxima[begin:end])


@kernel
def cut_wide(
    room: Any, rows: Any, width: int, r: int, params: Any, seeds: Any, positions: Any, children: Any,
    token_ids: Any, status: Any, num_kept: Any, maxima: Any, found: Any,
) -> tuple[bool, np.int32, np.int32, int, np.float32, int]:  # fmt: skip
    """Everything up to the draw: (whether it is still to come, largest key, cut, score and id of the likeliest token).

    found: of all parts, else least.
    """
    (_, keys, ids, spare, weights, words), _ = carve(room, width)
    highest, widest = np.int32(found[:, 0].max()), np.uint32(found[:, 1].max())
    token_ids[r], status[r], num_kept[r], top, n, key, last = cut_row(
        rows[r][:width], highest, widest, params[r], seeds[r], positions[r], children[r],
        False, maxima, keys, ids, spare, weights, words,
    )  # fmt: skip
    best, best_id = draw_likeliest(
        rows[r][:width], maxima, top, key, last, 0, seeds[r], positions[r], children[r]
    )  # fmt: skip
    return n == UNLISTED, top, key, last, best, best_id


@kernel
def draw_part(
    room: Any, rows: Any, width: int, r: int, begin: int, end: int, params: Any, seeds: Any, positions: Any,
    children: Any, maxima: Any, top: np.int32, key: np.int32, last: int, best: np.float32, best_id: int, scores: Any,
    drawn: Any,
) -> None:  # fmt: skip
    """The best score of the likeliest token and the blocks begin .. end - 1, and its id, in both at `begin`."""
    words, first = carve(room, width)[0][5], begin * BLOCK
    scores[begin], drawn[begin] = draw_others(
        rows[r][:width][first : end * BLOCK], maxima[begin:end], logit_of_key(top), params[r].reciprocal,
        key, last - first, first, seeds[r], positions[r], children[r], words, best, best_id,
    )  # fmt: skip


_cut_wide, _draw_part = in_room(cut_wide), in_room(draw_part)


def sample_wide(
    rows: Any, width: int, r: int, params: Any, seeds: Any, positions: Any, children: Any,
    token_ids: Any, status: Any, num_kept: Any, threads: int,
) -> None:  # fmt: skip
    """Sample one row, as `sample_rows` does, on several threads, a part each: every part has costs of its own."""
    blocks, asked = -(-width // BLOCK), (params, seeds, positions, children)
    maxima, found = np.empty(blocks, np.int32), np.full((blocks, 2), (-(2**31), 0), np.int64)
    share = -(-blocks // threads)
    over_rows(lambda i, j: read_part(rows, width, r, i, j, maxima, found), blocks, threads, grain=share)
    draws, *cut, score, token = _cut_wide(rows, width, r, *asked, token_ids, status, num_kept, maxima, found)
    if draws:
        cut = np.int32(cut[0]), np.int32(cut[1]), cut[2], np.float32(score), token
        scores, drawn = np.full(blocks, -np.inf, np.float32), np.zeros(blocks, np.int64)
        draw = lambda i, j: _draw_part(rows, width, r, i, j, *asked, maxima, *cut, scores, drawn)  # noqa: E731
        over_rows(draw, blocks, threads, grain=share)
        token_ids[r] = drawn[scores == scores.max()].min()
