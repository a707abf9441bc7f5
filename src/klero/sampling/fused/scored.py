"""The fused pass over rows that want logprobs, kept sets or probabilities, for Numba: rewrite, cut, draw, say."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.logprobs.cpu import (
    ONE,
    key_at,
    logprob_of_key,
    lse,
    say_raw,
    write_kept,
    write_list,
    write_row,
)
from klero.lots.mass.cpu import F32
from klero.rewrite.patches.cpu import rewritten_view
from klero.rows.maxima.cpu import block_maxima
from klero.rows.room import carve, carve_for_view
from klero.rows.select.cpu import ALL_ALIVE, block_masses, fill_masses, gather, logit_of_key, two_masses
from klero.rows.view.cpu import flush_key
from klero.sampling.filters.nucleus.cpu import UNLISTED
from klero.sampling.fused.cpu import sample_row
from klero.sampling.status import OK


@kernel
def sample_scored_rows(
    room: Any, rows: Any, width: int, chosen: Any, params: Any, seeds: Any, positions: Any, children: Any,
    slots: Any, rules: Any, masks: Any, mask_of_row: Any, token_ids: Any, status: Any, num_kept: Any,
    asks: Any, said: Any,
) -> None:  # fmt: skip
    """The chosen rows, as `sample_rewritten_rows`, and what each asks for beside its token."""
    (maxima, keys, ids, spare, weights, words), rest = carve(room, width)
    (room_of_view, raw_maxima), none = carve_for_view(rest, width), rest[:0]
    for r in chosen:
        mask = masks[mask_of_row[r]] if mask_of_row[r] >= 0 else none
        view, highest, widest = rewritten_view(rows[r][:width], rules, slots[r], mask, room_of_view, maxima)
        unchanged = view.state[0] == 0 and mask.size == 0
        token, status[r], num_kept[r], top, n = sample_row(
            view, highest, widest, params[r], seeds[r], positions[r], children[r],
            True, maxima, keys, ids, spare, weights, words,
        )  # fmt: skip
        token_ids[r] = token
        if status[r] != OK:
            continue
        if said.kept_row[r] >= 0 and n == UNLISTED:
            n = gather(view, maxima, ALL_ALIVE, keys, ids)
        if said.kept_row[r] >= 0:
            write_kept(keys, ids, n, logit_of_key(top), F32(params[r].reciprocal), said, r, weights)
        if asks.scored[r]:
            say(view, unchanged, flush_key(highest), token, n, top, params[r], maxima, raw_maxima, keys, ids, spare,
                weights, asks, said, r)  # fmt: skip


@kernel
def levels(
    view: Any, unchanged: bool, highest: np.int32, p: Any, maxima: Any, raw_maxima: Any, weights: Any
) -> tuple[np.float32, np.float32, np.float32]:
    """(largest logit of the model's row, its lse, lse of the rewritten row at its temperature). raw_maxima: filled."""
    reciprocal = F32(p.reciprocal)
    if unchanged:
        raw_maxima[:] = maxima
        maximum = logit_of_key(highest)
        raw, all_kept = two_masses(view.raw, maxima, maximum, ONE if p.greedy else reciprocal)
        return maximum, lse(raw), lse(all_kept)
    raw_top, _ = block_maxima(view.raw, raw_maxima)
    maximum = logit_of_key(flush_key(raw_top))
    raw = block_masses(view.raw, raw_maxima, maximum, ONE, weights)
    if p.greedy:
        return maximum, lse(raw), F32(0)
    return maximum, lse(raw), lse(block_masses(view, maxima, logit_of_key(highest), reciprocal, weights))


@kernel
def say(
    view: Any, unchanged: bool, highest: np.int32, token: int, n: int, top: np.int32, p: Any, maxima: Any,
    raw_maxima: Any, keys: Any, ids: Any, spare: Any, weights: Any, asks: Any, said: Any, r: int,
) -> None:  # fmt: skip
    """Logprob, rank, lists and receipt of a token. highest: largest key of the rewritten row; top: of the kept tokens,
    of which n are listed (UNLISTED: all are left, and none is listed). The lists are overwritten."""
    raw_maximum, raw_lse, row_lse = levels(view, unchanged, highest, p, maxima, raw_maxima, weights)
    said.raw[r] = logprob_of_key(key_at(view.raw, token), raw_maximum, ONE, raw_lse)
    reciprocal, maximum = F32(p.reciprocal), logit_of_key(top)
    if p.greedy:
        level, said.kept_mass[r] = F32(0), F32(0)
    elif n == UNLISTED:
        level, said.kept_mass[r] = row_lse, F32(0)
    else:
        level = lse(fill_masses(keys, n, maximum, reciprocal, weights))
        kept = level
        if top != highest:
            kept = lse(fill_masses(keys, n, logit_of_key(highest), reciprocal, weights))
        said.kept_mass[r] = kept - row_lse
    said.processed[r] = logprob_of_key(key_at(view, token), maximum, reciprocal, level)
    if not asks.processed[r]:
        say_raw(view.raw, raw_maxima, raw_maximum, raw_lse, token, asks, said, r, keys, ids, spare, weights)
        return
    said.sampled[r] = said.processed[r]
    if n == UNLISTED:
        write_row(view, maxima, token, level, maximum, reciprocal, asks, said, r, keys, ids, spare, weights)
    else:
        write_list(token, keys, ids, n, level, maximum, reciprocal, asks, said, r)
