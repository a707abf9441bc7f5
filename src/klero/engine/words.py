"""Between words and token ids: what bad_words ban, and which columns of the logits are tokens at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from klero.errors import Fault, ParameterError

Encode = Callable[[str], Sequence[int]]
Word = tuple[int, ...]


def bad_word_ids(words: Sequence[str], encode: Encode | None, vocab_size: int) -> tuple[Word, ...]:
    """Every word in both tokenisations, as it is and after a space, whatever their lengths; no sequence twice.

    encode: text to ids, without special tokens. A sequence with an id outside the logits can never come and is left
    out. Raises ParameterError where there is no tokenizer, or where a word has no tokens.
    """
    if not words:
        return ()
    if encode is None:
        rule = "are text, and there is no tokenizer; load one, or use bad_token_ids"
        raise ParameterError([Fault("bad_words", words, rule)])
    sequences: dict[Word, None] = {}
    for word in words:
        both = [tuple(int(i) for i in encode(text)) for text in (word, " " + word)]
        if not both[0]:
            raise ParameterError([Fault("bad_words", word, "has no tokens in this tokenizer; leave it out")])
        sequences |= dict.fromkeys(ids for ids in both if ids and 0 <= min(ids) <= max(ids) < vocab_size)
    return tuple(sequences)


def padded_from(tokenizer: Any, vocab_size: int) -> int | None:
    """The first column of the logits past the tokenizer's highest id; None where there is none, or nobody knows."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    num_tokens = max(tokenizer.get_vocab().values(), default=vocab_size - 1) + 1
    return num_tokens if num_tokens < vocab_size else None
