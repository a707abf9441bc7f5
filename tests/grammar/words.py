"""A matcher that a reader can check by eye: the texts are given as lists of token ids."""

from __future__ import annotations


def bits(words, num_tokens):
    """The ids that a mask allows."""
    return {i for i in range(num_tokens) if words[i >> 5] >> (i & 31) & 1}


def write(words, ids):
    """Write a mask that allows these ids."""
    words[:] = 0
    for i in ids:
        words.view("uint32")[i >> 5] |= 1 << (i & 31)


class OneOf:
    """A matcher of a few texts, each followed by any number of end ids. fails_at: the position whose mask fails."""

    def __init__(self, texts, end_ids, fails_at=None):
        self.texts, self.end_ids, self.taken, self.fails_at = [tuple(text) for text in texts], end_ids, [], fails_at

    def allowed(self):
        ended = bool(self.taken) and self.taken[-1] in self.end_ids
        here = () if ended else tuple(self.taken)
        longer = {text[len(here)] for text in self.texts if text[: len(here)] == here and len(text) > len(here)}
        return set(self.end_ids) if ended else longer | (set(self.end_ids) if here in self.texts else set())

    def fill(self, words):
        if len(self.taken) == self.fails_at:
            raise RuntimeError("no mask here")
        write(words, self.allowed())

    def accept(self, token_id):
        if token_id not in self.allowed():
            return False
        self.taken.append(token_id)
        return True

    def rewind(self, num_tokens):
        del self.taken[len(self.taken) - num_tokens :]
