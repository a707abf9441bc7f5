"""The fused pass over rows that rules rewrite, for Numba: the rules act on what is read, the row stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.rewrite.patches.cpu import patch_listed, settle, view_of
from klero.sampling.fused.cpu import room_for, sample_row
from klero.sampling.maxima.cpu import block_maxima, is_bad


@kernel
def sample_rewritten_rows(
    rows: Any, width: int, chosen: Any, params: Any, seeds: Any, positions: Any, children: Any,
    slots: Any, rules: Any, masks: Any, mask_of_row: Any, token_ids: Any, status: Any, num_kept: Any,
) -> None:  # fmt: skip
    """The chosen rows, as `sample_rows`, each after the rules of its slot and its mask (-1: none)."""
    maxima, keys, ids, spare, weights, words = room_for(width)
    copy, touched, none = np.empty(width, np.int32), np.empty(maxima.size, np.uint8), np.empty(0, np.int32)
    for r in chosen:
        view = view_of(rows[r][:width], copy, touched)
        highest, widest = block_maxima(view.raw, maxima)
        if not is_bad(highest, widest):
            mask = masks[mask_of_row[r]] if mask_of_row[r] >= 0 else none
            patch_listed(view, rules, slots[r])
            highest, widest = settle(view, mask, widest, params[r].greedy, maxima)
        token_ids[r], status[r], num_kept[r] = sample_row(
            view, highest, widest, params[r], seeds[r], positions[r], children[r],
            maxima, keys, ids, spare, weights, words,
        )  # fmt: skip
