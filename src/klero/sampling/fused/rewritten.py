"""The fused pass over rows that rules rewrite, for Numba: the rules act on what is read, the row stays as it is."""

from __future__ import annotations

from typing import Any

from klero.device import kernel
from klero.rewrite.patches.cpu import rewritten_view
from klero.rows.room import carve, carve_for_view
from klero.sampling.fused.cpu import sample_row


@kernel
def sample_rewritten_rows(
    room: Any, rows: Any, width: int, chosen: Any, params: Any, seeds: Any, positions: Any, children: Any,
    slots: Any, rules: Any, masks: Any, mask_of_row: Any, token_ids: Any, status: Any, num_kept: Any,
) -> None:  # fmt: skip
    """The chosen rows, as `sample_rows`, each after the rules of its slot and its mask (-1: none)."""
    (maxima, keys, ids, spare, weights, words), rest = carve(room, width)
    room_of_view, none = carve_for_view(rest, width)[0], rest[:0]
    for r in chosen:
        mask = masks[mask_of_row[r]] if mask_of_row[r] >= 0 else none
        view, highest, widest = rewritten_view(rows[r][:width], rules, slots[r], mask, room_of_view, maxima)
        token_ids[r], status[r], num_kept[r], _, _ = sample_row(
            view, highest, widest, params[r], seeds[r], positions[r], children[r],
            False, maxima, keys, ids, spare, weights, words,
        )  # fmt: skip
