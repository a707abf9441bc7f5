"""Patches for Numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from klero.batch.ngrams.cpu import newest
from klero.device import inline, kernel
from klero.lots.mass.cpu import I32, KEY_NEG_INF, KEY_POS_INF, flush, key_of_bits
from klero.rewrite.bias.cpu import F32, add_bias
from klero.rewrite.penalties.cpu import penalised
from klero.rewrite.rules import ALWAYS
from klero.rewrite.view.cpu import (
    BITS_NEG_INF,
    BLOCK,
    WORDS,
    View,
    bits_of,
    fill_block,
    flush_key,
    is_allowed,
    is_masked,
    largest_allowed,
    largest_of_block,
)

U32 = np.uint32
NOT_SEEN = I32(-1)


class Room(NamedTuple):
    """Scratch for the patches of one row: at most one for each of V tokens. num: int64 [1], patches so far.

    places: int32 [V], the patch of a token plus 1, 0 for none.

    none: int32 [0], the mask of a row without one.
    """

    num: Any
    places: Any
    heads: Any
    links: Any
    ids: Any
    bits: Any
    biases: Any
    counts: Any
    banned: Any
    touched: Any
    block: Any
    lanes: Any
    none: Any


@kernel
def room_for_patches(width: int) -> Any:
    """Make the scratch for rows of a width."""
    blocks = (width + BLOCK - 1) // BLOCK
    return Room(
        np.zeros(1, np.int64), np.zeros(width, np.int32),
        np.empty(blocks, np.int32), np.empty(width, np.int32), np.empty(width, np.int32),
        np.empty(width, np.int32), np.empty(width, np.float32), np.empty(width, np.int32), np.empty(width, np.uint8),
        np.empty(blocks, np.uint8), np.empty(BLOCK, np.int32), np.empty(32, np.int32),
        np.empty(0, np.int32),
    )  # fmt: skip


@inline
def patch_of(room: Any, i: int) -> int:
    """The patch of a token; a new one changes nothing yet."""
    if room.places[i] > 0:
        return room.places[i] - 1
    j = room.num[0]
    room.num[0] = room.places[i] = j + 1
    room.ids[j], room.biases[j], room.counts[j], room.banned[j] = i, F32(0), NOT_SEEN, 0
    room.links[j] = room.heads[i // BLOCK]
    room.heads[i // BLOCK] = j
    return j


@kernel
def list_patches(rules: Any, slot: int, width: int, room: Any) -> None:
    """List every token that the rules of a slot name. Ids at `width` and above are padding and have no patch."""
    for j in range(room.num[0]):
        room.places[room.ids[j]] = 0
    room.num[0] = 0
    room.heads[:] = -1
    scales = rules.penalties[slot].repetition != F32(1)
    for e in range(rules.num_seen[slot]):
        if (scales or rules.seen_counts[slot, e] > 0) and rules.seen_ids[slot, e] < width:
            room.counts[patch_of(room, rules.seen_ids[slot, e])] = rules.seen_counts[slot, e]
    for e in range(rules.bias_starts[slot], rules.bias_starts[slot + 1]):
        if rules.bias_ids[e] < width:
            room.biases[patch_of(room, rules.bias_ids[e])] = rules.bias_values[e]
    list_words(rules, slot, width, room)
    if rules.ngram_sizes[slot] > 0:
        history, previous = rules.history[slot], rules.ngram_previous[slot]
        position = newest(
            history, rules.lengths[slot], rules.ngram_sizes[slot], rules.ngram_index[slot], rules.ngram_log2_used[slot]
        )
        while position >= 0:
            if history[position] < width:
                room.banned[patch_of(room, history[position])] = 1
            position = previous[position] - 1


@kernel
def list_words(rules: Any, slot: int, width: int, room: Any) -> None:
    """Ban the last token of every word whose other tokens the history ends with."""
    history, end = rules.history[slot], rules.lengths[slot]
    begin = rules.prompt_lengths[slot]
    short = end - begin < rules.min_tokens[slot]
    w = rules.word_starts[slot]
    while w < rules.word_starts[slot + 1]:
        kind, length = rules.words[w], rules.words[w + 1]
        word = rules.words[w + 2 : w + 2 + length]
        w += 2 + length
        if kind != ALWAYS and not short:
            continue
        first = 0 if kind == ALWAYS else begin
        if end - first < length - 1 or word[length - 1] >= width:
            continue
        k = length - 2
        while k >= 0 and history[end - (length - 1) + k] == word[k]:
            k -= 1
        if k < 0:
            room.banned[patch_of(room, word[length - 1])] = 1


@inline
def rewritten_bits(bits: np.int32, bias: np.float32, count: np.int32, penalties: Any) -> np.int32:
    """The logit of one token after bias and penalties."""
    logit = add_bias(I32(flush(bits)).view(np.float32), bias)
    if count >= 0:
        logit = penalised(logit, count, penalties)
    return F32(logit).view(np.int32)


@kernel
def patch_block(view: Any, room: Any, b: int, penalties: Any, largest: np.int32) -> tuple[np.int32, np.uint32, bool]:
    """Compute the patches of a block: (their largest key, their largest bits, whether the block's largest left)."""
    most_key, most_bits, left = KEY_NEG_INF, U32(0), False
    j = room.heads[b]
    while j >= 0:
        before, after = bits_of(view.raw[room.ids[j]]), BITS_NEG_INF
        if room.banned[j] == 0 and is_allowed(view.mask, room.ids[j]):
            after = rewritten_bits(before, room.biases[j], room.counts[j], penalties)
        room.bits[j] = after
        key = flush_key(key_of_bits(after))
        left |= flush_key(key_of_bits(before)) == largest and key < largest
        most_key = max(most_key, key)
        most_bits = max(most_bits, U32(after))
        j = room.links[j]
    return most_key, most_bits, left


@kernel
def view_of(row: Any, room: Any, mask: Any) -> Any:
    """The row with the patches of the room. mask: int32 [W], or [0] for none."""
    return View(row, room.heads, room.links, room.ids, room.bits, mask, room.touched, room.block)


@kernel
def read_rewritten(view: Any, room: Any, penalties: Any, maxima: Any) -> tuple[np.int32, np.uint32]:
    """Fill the maxima of the row as rewritten; return its largest key and its largest bits.

    Of a bad row (NaN or +inf in the model's own logits) the largest raw key and bits are returned, which tell so.
    """
    raw_top, raw_widest, top, widest = I32(-(2**31)), U32(0), KEY_NEG_INF, U32(0)
    for b in range(maxima.size):
        block = view.raw[b * BLOCK : (b + 1) * BLOCK]
        raw_largest, most = largest_of_block(block)
        raw_top, raw_widest = max(raw_top, raw_largest), max(raw_widest, most)
        largest, left = flush_key(raw_largest), False
        masked = view.mask.size > 0 and is_masked(view.mask, b)
        room.touched[b] = masked or room.heads[b] >= 0
        if masked:
            largest = largest_allowed(block, view.mask[b * WORDS : (b + 1) * WORDS], room.lanes)
            most = U32(BITS_NEG_INF)
        if room.heads[b] >= 0:
            key, bits, left = patch_block(view, room, b, penalties, largest)
            largest, most = max(largest, key), max(most, bits)
        if left:
            largest, most = largest_of_block(fill_block(view, b))
            largest = flush_key(largest)
        maxima[b] = largest
        top, widest = max(top, largest), max(widest, most)
    if raw_top >= KEY_POS_INF or raw_widest > U32(BITS_NEG_INF):
        return raw_top, raw_widest
    return top, widest
