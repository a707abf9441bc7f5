"""What the rewriting kernels make of a row, laid open for tests."""

from __future__ import annotations

import numpy as np
from numba import njit

from klero.batch import History
from klero.rewrite import Rules
from klero.rewrite.patches.cpu import rewritten_view
from klero.rows.lanes import bits_of
from klero.rows.room import carve, carve_for_view, room_of
from klero.rows.view.cpu import BLOCK, bits_at, block_of, is_bad, num_alive


@njit(error_model="numpy")
def open_row(buffer, bits, rules, slot, mask, out, by_token, maxima):
    _, rest = carve(buffer, bits.size)
    room, _ = carve_for_view(rest, bits.size)
    room[0][:], room[1][:], room[2][:] = 77, 77, 77  # of a row before
    view, top, widest = rewritten_view(bits, rules, slot, mask, room, maxima)
    if is_bad(top, widest):
        return top, widest, 0
    alive = num_alive(view, widest)
    for i in range(bits.size):
        by_token[i] = bits_at(view, i)
    for b in range(maxima.size):
        block = block_of(view, b)
        for i in range(block.size):
            out[b * BLOCK + i] = bits_of(block[i])
    return top, widest, alive


def rewrite_by_kernel(raw, at):
    """What a row and a Context come to: (logits by block, by token, block maxima, largest key and bits, tokens left).

    raw: float32 [V] or the bits of bfloat16, uint16 [V]; logits: float32 [V].
    """
    width = len(raw)
    history = History(1, len(at.history) + 1)
    history.ids[:] = 2**31 - 1  # past the length nothing may be read
    rules = Rules(1, width, history)
    history.start(0, at.prompt_ids, at.output_ids)
    rules.start(0, at)
    pool, mask_of_slot = rules.masks(np.zeros(1, np.int32))
    mask = np.empty(0, np.int32)
    if mask_of_slot[0] >= 0:
        mask = pool[0] if at.mask is None else pool[0] & at.mask
    elif at.mask is not None:
        mask = at.mask
    bits = raw if raw.dtype == np.uint16 else raw.view(np.int32)
    out, by_token = np.empty(width, np.int32), np.empty(width, np.int32)
    maxima = np.empty(-(-width // BLOCK), np.int32)
    mask = np.ascontiguousarray(mask)
    top, widest, alive = open_row(room_of(width), bits, rules.arrays(), 0, mask, out, by_token, maxima)
    return out.view(np.float32), by_token.view(np.float32), maxima, top, widest, alive
