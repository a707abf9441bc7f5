"""Patches for Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.batch.ngrams.cpu import newest
from klero.device import kernel
from klero.lots.mass.cpu import I32, I64, KEY_NEG_INF
from klero.rewrite.bias.cpu import F32, add_bias
from klero.rewrite.penalties.cpu import penalised
from klero.rewrite.rules import ALWAYS
from klero.rows.view.cpu import (
    ALL_ALLOWED,
    BITS_NEG_INF,
    BLOCK,
    KEY_MIN,
    MARKED,
    MASKED,
    RAW,
    WORDS,
    View,
    all_and_any,
    block_in_copy,
    borrowed,
    copy_masked,
    flush_key,
    is_bad,
    largest_of_block,
    room_in_copy,
)

U32 = np.uint32


@kernel
def rewritten_view(row: Any, rules: Any, slot: int, mask: Any, room: Any, maxima: Any) -> Any:
    """A row as the rules of a slot and a mask leave it: (view, its largest key, a bound of its largest bits).

    mask: int32 [W], or [0] for none. room: from `carve_for_view`. maxima: int32 [B], filled. Of a bad row (NaN or +inf
    in the model's own logits, banned tokens included) the largest raw key and bits are returned, which tell so.
    """
    starts, copy, state = room
    state[0] = 0
    view = View(
        borrowed(row), borrowed(starts), borrowed(copy), borrowed(state), borrowed(mask), borrowed(maxima)
    )  # fmt: skip
    mark_listed(starts, rules, slot, row.size)
    top, widest = read_marked(view)
    state[1] = widest < U32(BITS_NEG_INF)
    if not is_bad(top, widest):
        patch_listed(view, rules, slot)
        top, widest = settle(view, widest)
    return view, top, widest


@kernel
def mark_listed(starts: Any, rules: Any, slot: int, width: int) -> None:
    """Mark the blocks that bias and penalties change; bans, which are few, copy theirs when they come."""
    starts[:] = MARKED if rules.dense[slot] else RAW
    for i in rules.bias_ids[rules.bias_starts[slot] : rules.bias_starts[slot + 1]]:
        if i < width:
            starts[i // BLOCK] = MARKED
    for i in rules.seen_ids[slot, : rules.num_seen[slot]]:
        if i < width:
            starts[i // BLOCK] = MARKED


@kernel
def read_marked(view: Any) -> tuple[np.int32, np.uint32]:
    """Read the model's row: its block maxima, its largest key and bits. Marked blocks are copied while at hand."""
    raw, maxima = view.raw, view.maxima
    top, widest = KEY_MIN, U32(0)
    for b in range(maxima.size):
        largest, bits_most = largest_of_block(raw[b * BLOCK : (b + 1) * BLOCK])
        maxima[b] = flush_key(largest)
        top, widest = max(top, largest), max(widest, bits_most)
        if view.starts[b] == MARKED:
            block_in_copy(view, b)
    return top, widest


@kernel
def patch_listed(view: Any, rules: Any, slot: int) -> None:
    """Apply the rules of a slot to the tokens that they list. Ids from V on are padding: no rule reaches them."""
    if rules.dense[slot]:
        patch_all(view, rules.dense_bias[slot])
    first, last = rules.bias_starts[slot], rules.bias_starts[slot + 1]
    if first < last:
        patch_bias(view, rules.bias_ids[first:last], rules.bias_values[first:last])
    count = rules.num_seen[slot]
    if count > 0:
        patch_seen(view, rules.seen_ids[slot, :count], rules.seen_counts[slot, :count], rules.penalties[slot])
    if rules.word_starts[slot] < rules.word_starts[slot + 1]:
        ban_words(view, rules, slot)
    if rules.ngram_sizes[slot] > 0:
        ban_ngrams(view, rules, slot)


@kernel
def patch_all(view: Any, bias: Any) -> None:
    """`embedding_bias`. bias: float32 [V]."""
    for b in range(view.starts.size):
        block = block_in_copy(view, b)
        add_biases(block, bias[b * BLOCK : b * BLOCK + block.size])


@kernel
def add_biases(block: Any, bias: Any) -> None:
    """l + b for every token of a block."""
    for i in range(block.size):
        block[i] = F32(add_bias(I32(block[i]).view(np.float32), bias[i])).view(np.int32)


@kernel
def patch_bias(view: Any, ids: Any, values: Any) -> None:
    """`logit_bias`."""
    starts, copy, width = view.starts, view.copy, view.raw.size
    for e in range(ids.size):
        i = I64(ids[e])
        if i < width:
            at = starts[i // BLOCK] + i % BLOCK
            copy[at] = F32(add_bias(I32(copy[at]).view(np.float32), values[e])).view(np.int32)


@kernel
def patch_seen(view: Any, ids: Any, counts: Any, penalties: Any) -> None:
    """Penalties. ids, counts: the tokens that occurred, and how often since they count (0: only repetition acts)."""
    starts, copy, width = view.starts, view.copy, view.raw.size
    for e in range(ids.size):
        i = I64(ids[e])
        if i < width:
            at = starts[i // BLOCK] + i % BLOCK
            copy[at] = F32(penalised(I32(copy[at]).view(np.float32), counts[e], penalties)).view(np.int32)


@kernel
def ban(view: Any, i: int) -> None:
    """Make a token impossible."""
    if i < view.raw.size:
        block_in_copy(view, i // BLOCK)[i % BLOCK] = BITS_NEG_INF


@kernel
def ban_words(view: Any, rules: Any, slot: int) -> None:
    """Ban the last token of every word whose other tokens the history ends with."""
    history, end = rules.history[slot], rules.lengths[slot]
    begin = rules.prompt_lengths[slot]
    short = end - begin < rules.min_tokens[slot]
    words = rules.words[rules.word_starts[slot] : rules.word_starts[slot + 1]]
    w = 0
    while w < words.size:
        kind, length = words[w], words[w + 1]
        word = words[w + 2 : w + 2 + length]
        w += 2 + length
        if kind != ALWAYS and not short:
            continue
        first = 0 if kind == ALWAYS else begin
        if end - first < length - 1:
            continue
        k = length - 2
        while k >= 0 and history[end - (length - 1) + k] == word[k]:
            k -= 1
        if k < 0:
            ban(view, I64(word[length - 1]))


@kernel
def ban_ngrams(view: Any, rules: Any, slot: int) -> None:
    """Ban every token that would complete an n-gram of the history."""
    history, previous = rules.history[slot], rules.ngram_previous[slot]
    position = newest(
        history, rules.lengths[slot], rules.ngram_sizes[slot], rules.ngram_index[slot], rules.ngram_log2_used[slot]
    )
    while position >= 0:
        ban(view, I64(history[position]))
        position = previous[position] - 1


@kernel
def settle(view: Any, widest: np.uint32) -> tuple[np.int32, np.uint32]:
    """Correct the block maxima; return the largest key and a bound of the largest bits. widest: of the model's row.

    A block that only the mask changes waits until it is read, with the model's maximum as a bound: here those are read
    that may hold the largest logit, and it is rare that many may.
    """
    starts, mask, maxima = view.starts, view.mask, view.maxima
    top = KEY_NEG_INF
    for b in range(maxima.size):
        together, either = all_and_any(mask, b)
        if mask.size > 0 and together != ALL_ALLOWED:
            widest = U32(BITS_NEG_INF)
            if starts[b] >= 0:
                block = block_in_copy(view, b)
                copy_masked(block, mask[b * WORDS : (b + 1) * WORDS], room_in_copy(view, b))
            else:
                starts[b], maxima[b] = MASKED, maxima[b] if either != 0 else KEY_NEG_INF
                if maxima[b] > top:
                    block_in_copy(view, b)
                    top = max(top, maxima[b])
                continue
        if starts[b] >= 0:
            largest, bits = largest_of_block(block_in_copy(view, b))
            maxima[b] = flush_key(largest)
            widest = max(widest, bits)
        top = max(top, maxima[b])
    return top, widest
