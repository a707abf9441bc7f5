"""Patches for Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.batch.ngrams.cpu import newest
from klero.device import inline, kernel
from klero.lots.mass.cpu import I32, KEY_NEG_INF
from klero.rewrite.bias.cpu import F32, add_bias
from klero.rewrite.penalties.cpu import penalised
from klero.rewrite.rules import ALWAYS
from klero.rewrite.view.cpu import (
    BITS_NEG_INF,
    BLOCK,
    WORDS,
    View,
    bans_all,
    copy_masked,
    flush_key,
    is_masked,
    largest_of_block,
    touch,
)

U32 = np.uint32


@kernel
def view_of(row: Any, copy: Any, touched: Any) -> Any:
    """A row that nothing rewrites yet. copy: int32 [V], touched: uint8 [B], scratch."""
    touched[:] = 0
    return View(row, copy, touched)


@kernel
def patch_listed(view: Any, rules: Any, slot: int) -> None:
    """Apply the rules of a slot to the tokens that they list. Ids from V on are padding: no rule reaches them."""
    if rules.dense[slot]:
        patch_all(view, rules.dense_bias[slot])
    first, last = rules.bias_starts[slot], rules.bias_starts[slot + 1]
    if first < last:
        patch_bias(view, rules.bias_ids[first:last], rules.bias_values[first:last])
    if rules.num_seen[slot] > 0:
        count = rules.num_seen[slot]
        patch_seen(view, rules.seen_ids[slot, :count], rules.seen_counts[slot, :count], rules.penalties[slot])
    if rules.word_starts[slot] < rules.word_starts[slot + 1]:
        ban_words(view, rules, slot)
    if rules.ngram_sizes[slot] > 0:
        ban_ngrams(view, rules, slot)


@kernel
def patch_all(view: Any, bias: Any) -> None:
    """`embedding_bias`. bias: float32 [V]."""
    raw, copy, touched = view.raw, view.copy, view.touched
    for b in range(touched.size):
        touch(raw, copy, touched, b)
    for i in range(raw.size):
        copy[i] = F32(add_bias(I32(copy[i]).view(np.float32), bias[i])).view(np.int32)


@kernel
def patch_bias(view: Any, ids: Any, values: Any) -> None:
    """`logit_bias`."""
    raw, copy, touched = view.raw, view.copy, view.touched
    for e in range(ids.size):
        i = ids[e]
        if i < raw.size:
            touch(raw, copy, touched, i // BLOCK)
            copy[i] = F32(add_bias(I32(copy[i]).view(np.float32), values[e])).view(np.int32)


@kernel
def patch_seen(view: Any, ids: Any, counts: Any, penalties: Any) -> None:
    """Penalties. ids, counts: the tokens that occurred, and how often since they count."""
    raw, copy, touched = view.raw, view.copy, view.touched
    scales = penalties.repetition != F32(1)
    for e in range(ids.size):
        i, count = ids[e], counts[e]
        if i < raw.size and (scales or count > 0):
            touch(raw, copy, touched, i // BLOCK)
            copy[i] = F32(penalised(I32(copy[i]).view(np.float32), count, penalties)).view(np.int32)


@inline
def ban(view: Any, i: int) -> None:
    """Make a token impossible."""
    if i < view.raw.size:
        touch(view.raw, view.copy, view.touched, i // BLOCK)
        view.copy[i] = BITS_NEG_INF


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
            ban(view, word[length - 1])


@kernel
def ban_ngrams(view: Any, rules: Any, slot: int) -> None:
    """Ban every token that would complete an n-gram of the history."""
    history, previous = rules.history[slot], rules.ngram_previous[slot]
    position = newest(
        history, rules.lengths[slot], rules.ngram_sizes[slot], rules.ngram_index[slot], rules.ngram_log2_used[slot]
    )
    while position >= 0:
        ban(view, history[position])
        position = previous[position] - 1


@kernel
def settle(view: Any, mask: Any, widest: np.uint32, only_top: bool, maxima: Any) -> tuple[np.int32, np.uint32]:
    """Apply the mask, correct the block maxima; return the largest key of the row as rewritten and its largest bits.

    mask: int32 [W], or [0] for none. maxima, widest: of the model's row; of the bits a bound is returned. only_top:
    nothing but the largest logit counts, so blocks that cannot hold it keep a maximum that is below it.
    """
    raw, copy, touched = view.raw, view.copy, view.touched
    top = KEY_NEG_INF
    for b in range(maxima.size):
        masked = mask.size > 0 and is_masked(mask, b)
        if touched[b] != 0 or (masked and not (only_top and maxima[b] < top)):
            part = copy[b * BLOCK : (b + 1) * BLOCK]
            if masked:
                mask_block(raw, part, touched, mask[b * WORDS : (b + 1) * WORDS], b)
            largest, bits = largest_of_block(part)
            maxima[b] = flush_key(largest)
            widest = max(widest, bits)
        elif masked:
            continue
        top = max(top, maxima[b])
    return top, widest


@kernel
def mask_block(raw: Any, part: Any, touched: Any, words: Any, b: int) -> None:
    """Ban in block b what its words of the mask do not allow. part: its copy."""
    if bans_all(words):
        part[:] = BITS_NEG_INF
    elif touched[b] != 0:
        copy_masked(part, words, part)
    else:
        copy_masked(raw[b * BLOCK : (b + 1) * BLOCK], words, part)
    touched[b] = 1
