"""What rewrites the rows of each slot, as arrays that a kernel reads by slot. Written when a sequence is seated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch import Column, Columns, History
from klero.batch.counts import Counts
from klero.batch.ngrams import Ngrams
from klero.batch.ragged import Ragged
from klero.grammar.masks import Masks, words_of
from klero.rewrite.bans import bitmask
from klero.rewrite.context import Context
from klero.rewrite.penalties import PENALTIES, Penalties, penalties_of

IDS = npt.NDArray[np.integer]
Words = Sequence[tuple[int, ...]]
ALWAYS, UNTIL_MIN_TOKENS = 0, 1

COLUMNS = {
    "patched": Column(np.bool_, False),  # has rules that a kernel applies, besides min_tokens
    "penalties": Column(PENALTIES, np.array(Penalties(), PENALTIES)),
    "counted": Column(np.bool_, False),
    "min_tokens": Column(np.int32, 0),
    "ngram_sizes": Column(np.int32, 0),
    "masked": Column(np.bool_, False),
    "dense": Column(np.bool_, False),
}


class RuleArrays(NamedTuple):
    """The rules of S slots for the kernel: arrays by slot, or flat with `starts`.

    dense, dense_bias: bool [S], and the `embedding_bias` of those slots, float32 [S, V] ([0, V] before the first).
    bias_ids, bias_values: the entries of `logit_bias` of slot s at bias_starts[s]:bias_starts[s + 1]. penalties:
    PENALTIES [S]. seen_ids, seen_counts: int32 [S, E], the first num_seen[s] are valid (0: no penalties). words: int32,
    [kind, length, tokens...] one after the other, at word_starts[s]:word_starts[s + 1]; kind 0 bans always, 1 while
    fewer than min_tokens[s] tokens were generated, matched in the output alone. ngram_sizes: int32 [S], 0 off, with the
    arrays of `klero.batch.ngrams`. history: int32 [S, L]; lengths, prompt_lengths: int32 [S].
    """

    dense: Any
    dense_bias: Any
    bias_starts: Any
    bias_ids: Any
    bias_values: Any
    penalties: Any
    seen_ids: Any
    seen_counts: Any
    num_seen: Any
    word_starts: Any
    words: Any
    min_tokens: Any
    ngram_sizes: Any
    ngram_index: Any
    ngram_log2_used: Any
    ngram_previous: Any
    history: Any
    lengths: Any
    prompt_lengths: Any


class Rules:
    """The rules of each slot, and what they remember: counts and n-grams. Kernels only; the reference needs none of it.

    width: of the logits. history: the tokens of the same slots; `append` and `rewind` follow what happens to it.
    """

    def __init__(self, num_slots: int, width: int, history: History) -> None:
        self._width, self._history = width, history
        self._columns = Columns(num_slots, COLUMNS)
        self._bias_ids, self._bias_values = Ragged(num_slots, np.int32), Ragged(num_slots, np.float32)
        self._words = Ragged(num_slots, np.int32)
        self._counts = Counts(num_slots, history.max_len)
        self._ngrams = Ngrams(num_slots, history.max_len)
        self._masks = np.empty((0, words_of(width)), np.int32)  # a row a slot from the first allow-list on
        self._dense = np.empty((0, width), np.float32)  # a row a slot from the first `embedding_bias` on

    def start(self, index: int, at: Context) -> None:
        """Write the rules of a sequence whose tokens are in the history already."""
        params = at.params
        beyond = self._history.max_len + 1  # more than any history holds, and all the same from there on
        size, min_tokens = min(params.no_repeat_ngram_size, beyond), min(params.min_tokens, beyond)
        words = _stream(ALWAYS, params.bad_token_ids) + _stream(ALWAYS, at.bad_word_ids)
        until = _stream(UNTIL_MIN_TOKENS, at.min_tokens_words)
        patched = bool(params.rewrites or words)
        self._columns.write(
            index, patched=patched, penalties=np.array(penalties_of(params), PENALTIES), counted=params.penalises,
            min_tokens=min_tokens, ngram_sizes=size, masked=params.allowed_token_ids is not None,
            dense=params.embedding_bias is not None,
        )  # fmt: skip
        if params.embedding_bias is not None:
            self._dense = self._with_rows(self._dense)
            self._dense[index] = params.embedding_bias.array[: self._width]
        if params.logit_bias:
            self._bias_ids.write(index, [i for i, _ in params.logit_bias])
            self._bias_values.write(index, [bias for _, bias in params.logit_bias])
        if words or until:
            self._words.write(index, words + until)
        if params.allowed_token_ids is not None:
            self._masks = self._with_rows(self._masks)
            self._masks[index] = bitmask(params.allowed_token_ids, self._width)
        if params.penalises:
            self._count(index, at)
        if size:
            self._ngrams.start(index, size, self._history.ids[index], len(at.history))

    def append(self, indices: IDS, token_ids: IDS) -> None:
        """Take one accepted token for each slot; the history has it already."""
        counted = self._columns["counted"][indices]
        if counted.any():
            self._counts.append(indices[counted], token_ids[counted])
        grams = self._columns["ngram_sizes"][indices] > 0
        if grams.any():
            self._ngrams.append(indices[grams], self._history.ids, self._history.lengths)

    def rewind(self, index: int, length: int) -> None:
        """Take back what came after the first `length` tokens. The history still has it, and is rewound after this."""
        history, before = self._history.ids[index], int(self._history.lengths[index])
        self._history.check_rewind(index, length)
        if self._columns["counted"][index]:
            self._counts.rewind(index, history[length:before])
        if self._columns["ngram_sizes"][index]:
            self._ngrams.rewind(index, history, before, length)

    def reset(self, index: int) -> None:
        """Forget a slot."""
        if self._columns["counted"][index]:
            self._counts.reset(index)
        if self._columns["ngram_sizes"][index]:
            self._ngrams.reset(index)
        for ragged in (self._bias_ids, self._bias_values, self._words):
            ragged.reset(index)
        self._columns.reset(index)

    def patched(self, indices: IDS) -> npt.NDArray[np.bool_]:
        """Which slots have rules that act on their next token."""
        return self._columns["patched"][indices] | self.awaits_min_tokens(indices)

    def awaits_min_tokens(self, indices: IDS) -> npt.NDArray[np.bool_]:
        """Which slots have fewer tokens yet than they must."""
        output = self._history.lengths[indices] - self._history.prompt_lengths[indices]
        fewer: npt.NDArray[np.bool_] = output < self._columns["min_tokens"][indices]
        return fewer

    def masks(self, indices: IDS) -> Masks:
        """The allow-lists of rows that these slots have next."""
        return Masks(self._masks, np.where(self._columns["masked"][indices], indices, -1).astype(np.int32))

    def arrays(self, without_min_tokens: IDS | Sequence[int] = ()) -> RuleArrays:
        """Everything that the kernel reads. without_min_tokens: slots in which it bans nothing now."""
        counts, ngrams, history, columns = self._counts, self._ngrams, self._history, self._columns
        min_tokens = columns["min_tokens"]
        if len(without_min_tokens):
            min_tokens = min_tokens.copy()
            min_tokens[np.asarray(without_min_tokens)] = 0
        return RuleArrays(
            columns["dense"], self._dense, self._bias_ids.starts, self._bias_ids.flat, self._bias_values.flat,
            columns["penalties"], counts.ids, counts.counts, counts.num_entries, self._words.starts, self._words.flat,
            min_tokens, columns["ngram_sizes"], ngrams.index, ngrams.log2_used, ngrams.previous,
            history.ids, history.lengths, history.prompt_lengths,
        )  # fmt: skip

    def _with_rows(self, pool: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A row for each slot, where the pool has none yet."""
        return pool if len(pool) else np.zeros((len(self._columns["masked"]), pool.shape[1]), pool.dtype)

    def _count(self, index: int, at: Context) -> None:
        """Count the history. The prompt's ids matter where they count, and to a repetition penalty."""
        ignored = at.params.prompt_ignore_length
        counted_from = len(at.prompt_ids) if ignored is None else min(ignored, len(at.prompt_ids))
        prompt = at.prompt_ids if at.params.repetition_penalty != 1 else at.prompt_ids[counted_from:]
        skipped = len(at.prompt_ids) - len(prompt)
        self._counts.start(index, prompt, at.output_ids, counted_from - skipped)


def _stream(kind: int, words: Words) -> list[int]:
    """Words as [kind, length, tokens...] one after the other."""
    return [number for word in words for number in (kind, len(word), *word)]
