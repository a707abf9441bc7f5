"""A small vocabulary that thinks: a grammar of a few texts, and what is allowed, from the whole sequence at once."""

from __future__ import annotations

import numpy as np

from klero.grammar.thinking import Marks, Thinking

V, END = 8, 7
START, STOP = 1, 2
MARKS = Marks((START,), (STOP,))
PAIRS = Marks((3, 4), (5, 6))
ALL = set(range(V))


class OneOf:
    """The grammar of a few texts, as a user may write a matcher; it refuses what it did not allow."""

    def __init__(self, *texts, num_tokens=V, end_ids=(END,)):
        self.texts, self.num_tokens, self.end_ids, self.taken = texts, num_tokens, end_ids, []

    def fill(self, words):
        words[:] = words_of(next_of(self.texts, self.taken, self.end_ids), self.num_tokens)

    def accept(self, token_id):
        if token_id not in next_of(self.texts, self.taken, self.end_ids):
            return False
        self.taken.append(token_id)
        return True

    def rewind(self, num_tokens):
        assert 0 <= num_tokens <= len(self.taken)
        del self.taken[len(self.taken) - num_tokens :]


def next_of(texts, taken, end_ids=(END,)):
    """What may come after `taken` in one of these texts; end ids behind a whole one, and behind an end id."""
    taken = tuple(taken)
    ended = len(taken) > 0 and taken[-1] in end_ids
    more = {text[len(taken)] for text in texts if len(text) > len(taken) and text[: len(taken)] == taken}
    return more | (set(end_ids) if ended or taken in texts else set())


def words_of(ids, num_tokens):
    bits = np.zeros(-(-num_tokens // 32) * 32, np.uint8)
    bits[sorted(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def thinking(budget, prompt=(), marks=MARKS, inner=None, num_tokens=V, end_ids=(END,), turn_end_ids=(END,)):
    return Thinking(marks, budget, inner, prompt, num_tokens, end_ids, turn_end_ids)


def allowed(matcher, num_tokens=V):
    """What the mask allows; all its bits are written, and none beyond the vocabulary is 1."""
    bits = []
    for before in (0, -1):
        words = np.full(-(-num_tokens // 32), before, np.int32)
        matcher.fill(words)
        bits.append(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
    assert bits[0] == bits[1]
    return set(bits[0])


def run(matcher, *token_ids):
    """What is allowed after these tokens, each of which the mask allowed."""
    for token_id in token_ids:
        assert token_id in allowed(matcher)
        assert matcher.accept(token_id)
    return allowed(matcher)


# What is allowed, from the whole sequence at once: no state, no counting on.


def place(ids, mark, at):
    """Where a mark stands first from `at` on, or None."""
    return next((i for i in range(at, len(ids) - len(mark) + 1) if ids[i : i + len(mark)] == mark), None)


def scan(ids, marks, num_prompt):
    """Whether ids end while thinking, where the tokens behind the last mark begin, and how many behind num_prompt are
    thinking tokens; the tokens of an end mark that is not whole yet are among them."""
    inside, at, thought = False, 0, 0
    while (found := place(ids, marks.end if inside else marks.start, at)) is not None:
        thought += max(0, found - max(at, num_prompt)) if inside else 0
        at = found + len(marks.end if inside else marks.start)
        inside = not inside
    return inside, at, thought + (max(0, len(ids) - max(at, num_prompt)) if inside else 0)


def begun(ids, mark):
    """How much of the mark ids end with; a whole mark does not count."""
    return next(k for k in range(len(mark) - 1, -1, -1) if k <= len(ids) and ids[len(ids) - k :] == mark[:k])


def turn_of(prompt):
    return tuple(prompt)[len(prompt) - prompt[::-1].index(END) if END in prompt else 0 :]


def expected(prompt, output, budget, marks, texts):
    """The definition. texts: of the grammar, None for no grammar."""
    turn = turn_of(list(prompt))
    if texts is None:
        return expected_inside(turn, tuple(output), budget, marks, ALL)
    inside, at, _ = scan(turn, marks, 0)
    rest, output = turn[at:], tuple(output)
    if not inside and budget is None:
        return next_of(texts, output)
    if not inside:
        lengths = [k for k in range(len(marks.start)) if k <= len(rest)]
        heads = [rest[len(rest) - k :] + output for k in lengths if rest[len(rest) - k :] == marks.start[:k]]
        whole = [head for head in heads if head[: len(marks.start)] == marks.start]
        if not whole:
            ahead = {marks.start[len(head)] for head in heads if head == marks.start[: len(head)]}
            return ahead | next_of(texts, output)
        rest, output = (), min((head[len(marks.start) :] for head in whole), key=lambda behind: -len(behind))
    end = place(rest + output, marks.end, 0)
    if end is not None:
        return next_of(texts, (rest + output)[end + len(marks.end) :])
    return expected_inside(marks.start + rest, output, budget, marks, ALL - {END})


def expected_inside(prompt, output, budget, marks, free):
    ids = prompt + output
    inside, at, thought = scan(ids, marks, len(prompt))
    if not inside:
        return ALL
    return free if budget is None or thought < budget else {marks.end[begun(ids[at:], marks.end)]}
