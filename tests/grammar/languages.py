"""Small languages, and what may follow in them by trying every word: the reference of masks."""

from __future__ import annotations

import itertools

import numpy as np

from klero.finish import TokenBytes

TEXTS = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b"bb",
    b"<e>",
    b"<f>",
    b"",
    b"a",
    b"\xc3",
    b"\xa9",
    "é".encode(),
    b"c",
    b"</s>",
]
ENDS = (6, 7)
SPECIAL = (6, 7, 12)
NUM_TOKENS = len(TEXTS) + 3  # the last three have no text at all
TOKENS = TokenBytes.from_list(TEXTS, special=SPECIAL)


def allowed(matcher, num_tokens=NUM_TOKENS):
    """The ids of a mask, which must not have a bit beyond the vocabulary."""
    words = np.full(-(-num_tokens // 32), -1, np.int32)
    matcher.fill(words)
    return ids_of(words, num_tokens)


def ids_of(words, num_tokens=NUM_TOKENS):
    flags = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not flags[num_tokens:].any()
    return set(np.flatnonzero(flags).tolist())


def words_of_length(letters, most):
    """All words of up to so many letters."""
    return ["".join(word) for length in range(most + 1) for word in itertools.product(letters, repeat=length)]


def may_follow(language, taken):
    """What may follow the tokens `taken` in a language that is given as a set of byte strings."""
    if taken and taken[-1] in ENDS:
        return set(ENDS)
    prefix = b"".join(TEXTS[i] for i in taken)
    texts = {i: text for i, text in enumerate(TEXTS) if text and i not in SPECIAL}
    found = {i for i, text in texts.items() if any(word.startswith(prefix + text) for word in language)}
    return found | (set(ENDS) if prefix in language else set())
