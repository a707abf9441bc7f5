"""Thinking is held to its budget, the grammar begins behind it, and every step back is exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from klero.errors import OptionError, ParameterError
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


def thinking(budget, prompt=(), marks=MARKS, inner=None, num_tokens=V, end_ids=(END,)):
    return Thinking(marks, budget, inner, prompt, num_tokens, end_ids)


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


@pytest.mark.parametrize("budget, free", [(0, 0), (1, 1), (3, 3)])
def test_the_end_mark_comes_at_the_budget(budget, free):
    matcher = thinking(budget, prompt=[0, START])
    for _ in range(free):
        assert run(matcher) == ALL
        run(matcher, 4)
    assert run(matcher) == {STOP}
    assert not matcher.accept(4)
    assert run(matcher, STOP) == ALL  # and the text is free


def test_a_model_that_ends_by_itself_is_not_made_to_end():
    matcher = thinking(3, prompt=[START])
    assert run(matcher, 4, 4, STOP) == ALL  # one token before the budget
    assert run(matcher, 4, 4, 4, 4) == ALL
    assert run(thinking(9, prompt=[START]), 4, 4) == ALL  # a budget that nobody spends


def test_thinking_again_goes_on_counting():
    matcher = thinking(3)
    assert run(matcher, 0, START, 4, 4, STOP, 0, START) == ALL
    assert run(matcher, 4) == {STOP}
    assert run(matcher, STOP, 0, 0, START) == {STOP}  # nothing is left
    assert run(matcher, STOP, END) == ALL


def test_a_mark_with_nothing_inside_costs_nothing():
    assert run(thinking(1), START, STOP, START) == ALL
    matcher = thinking(0, inner=OneOf((0,)))
    assert run(matcher, START) == {STOP}
    assert run(matcher, STOP) == {0}


def test_a_mark_that_the_model_began_is_continued_not_begun_anew():
    matcher = thinking(2, prompt=[3, 4], marks=PAIRS)
    assert run(matcher, 0) == ALL
    assert run(matcher, 5) == {6}
    assert run(matcher, 6) == ALL
    matcher = thinking(2, prompt=[3, 4], marks=PAIRS)
    assert run(matcher, 0, 0) == {5}
    assert run(matcher, 5) == {6}


def test_a_mark_that_breaks_was_thought():
    matcher = thinking(3, prompt=[3, 4], marks=PAIRS)
    assert run(matcher, 5, 0) == ALL
    assert run(matcher, 5) == {6}
    matcher = thinking(4, prompt=[3, 4], marks=PAIRS)
    assert run(matcher, 5, 5) == ALL  # the second may still begin it
    assert run(matcher, 6, 3, 4) == ALL  # only the first was thought: three are left
    assert run(matcher, 0, 0, 0) == {5}


def test_a_mark_overlaps_with_itself():
    marks = Marks((3,), (5, 5, 6))
    assert run(thinking(9, marks=marks), 3, 5, 5, 5, 6) == ALL
    matcher = thinking(4, prompt=[3], marks=marks, inner=OneOf((0, 0)))
    assert run(matcher, 5, 5, 5, 5) == {6}
    assert run(matcher, 6) == {0}


def test_no_token_belongs_to_two_marks():
    marks = Marks((3, 5), (5, 6))
    assert run(thinking(0, marks=marks), 3, 5) == {5}
    assert run(thinking(2, marks=marks), 3, 5, 6, 0) == {5}


def test_marks_lie_across_the_border_of_prompt_and_output():
    matcher = thinking(1, prompt=[0, 3], marks=PAIRS)
    assert run(matcher, 4) == ALL
    assert run(matcher, 0) == {5}
    matcher = thinking(0, prompt=[3, 4, 0, 5], marks=PAIRS)
    assert run(matcher) == {6}
    assert run(matcher, 6) == ALL
    matcher = thinking(1, prompt=[3, 4, 0, 5], marks=PAIRS)  # the prompt's tokens are not counted
    assert run(matcher) == ALL
    assert run(matcher, 0) == {5}


@pytest.mark.parametrize(
    "prompt, inside",
    [
        ([], False),
        ([0, START, 4], True),
        ([START, 4, STOP, 0], False),
        ([START, 4, STOP, 0, START], True),
        ([STOP, 4], False),
        ([START, START, STOP], False),
        ([START, STOP, STOP, START], True),
        ([START, 4, 4, END, 0, 0], False),  # a turn that was cut off while it thought
        ([0, START, END, 0, START, 4], True),
    ],
)
def test_the_prompt_tells_whether_the_output_begins_inside(prompt, inside):
    assert run(thinking(0, prompt=prompt)) == ({STOP} if inside else ALL)
    assert run(thinking(0, prompt=np.array(prompt, np.int32))) == ({STOP} if inside else ALL)
    assert run(thinking(None, prompt=prompt, inner=OneOf((6, 6)))) == (ALL - {END} if inside else {6})


def test_an_end_id_ends_a_thought_only_where_no_grammar_waits():
    assert run(thinking(2, prompt=[START]), END) == ALL
    matcher = thinking(2, prompt=[START], inner=OneOf((0,)))
    assert run(matcher, 4) == ALL - {END}
    assert not matcher.accept(END)
    assert run(matcher, 4) == {STOP}
    assert run(matcher, STOP) == {0}
    assert run(matcher, 0) == {END}
    assert run(matcher, END) == {END}


def test_without_a_budget_the_grammar_waits_for_the_mark_or_for_nothing():
    matcher = thinking(None, prompt=[START], inner=OneOf((0, 0)))
    assert run(matcher, *[4] * 50) == ALL - {END}
    assert run(matcher, STOP) == {0}
    assert run(thinking(None, inner=OneOf((0, 0)))) == {0}  # nobody thinks


def test_the_output_begins_with_the_mark_or_with_the_grammar():
    assert run(thinking(1, inner=OneOf((0, 6)))) == {0, START}
    assert run(thinking(1, inner=OneOf((0, 6))), 0) == {6}
    matcher = thinking(1, inner=OneOf((0, 6)))
    assert run(matcher, START) == ALL - {END}
    assert run(matcher, 4) == {STOP}
    assert run(matcher, STOP, 0, 6) == {END}


def test_both_are_meant_until_one_cannot_be():
    texts = ((3, 0), (3, 3, 0), (3, 4))
    matcher = thinking(1, marks=PAIRS, inner=OneOf(*texts))
    assert run(matcher) == {3}
    assert run(matcher, 3) == {4, 0, 3}
    assert run(matcher, 4) == ALL - {END}  # a whole mark, though the grammar has that text
    assert run(matcher, 5, 6) == {3}
    assert run(matcher, 3, 4) == {END}  # in the grammar's text marks are text
    matcher.rewind(5)
    assert run(matcher) == {4, 0, 3}
    assert run(matcher, 3) == {0}
    matcher = thinking(1, marks=PAIRS, inner=OneOf((0,)))
    assert run(matcher, 3) == {4}  # the mark alone
    matcher.rewind(1)
    assert run(matcher, 0) == {END}
    assert run(thinking(1, prompt=[3], marks=PAIRS, inner=OneOf((0,)))) == {0, 3, 4}  # its rest, or a whole one


def test_a_later_mark_is_none_for_a_grammar():
    matcher = thinking(1, inner=OneOf((START, START), (0, START, 0)))
    assert run(matcher, 0, START, 0) == {END}
    assert run(thinking(0, prompt=[START], inner=OneOf((STOP, START, STOP))), STOP, STOP, START) == {STOP}


def test_what_may_not_come_changes_nothing():
    matcher = thinking(1, marks=PAIRS, inner=OneOf((3, 0)))
    for token_id in (-1, V, END, 0, 4):
        assert not matcher.accept(token_id)
        assert run(matcher) == {3}
    run(matcher, 3)
    assert not matcher.accept(5)
    assert run(matcher) == {0, 4}


def test_more_than_was_taken_cannot_be_taken_back():
    matcher = thinking(1)
    run(matcher, 0, START)
    matcher.rewind(0)
    for num_tokens in (3, -1):
        with pytest.raises(OptionError, match=r"num_tokens=.*\[0, 2\]"):
            matcher.rewind(num_tokens)
    matcher.rewind(2)


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 63, 64, 65, 96])
def test_masks_cover_the_vocabulary_and_no_more(num_tokens):
    last, end_ids = num_tokens - 1, (0, min(31, num_tokens - 3), num_tokens + 5)
    everything = set(range(num_tokens))
    marks = Marks((last,), (last - 1,))
    assert allowed(thinking(1, num_tokens=num_tokens), num_tokens) == everything
    matcher = thinking(1, [last], marks, OneOf((last,), num_tokens=num_tokens), num_tokens, end_ids)
    assert allowed(matcher, num_tokens) == everything - set(end_ids)
    assert matcher.accept(5)
    assert allowed(matcher, num_tokens) == {last - 1}
    matcher = thinking(1, (), marks, OneOf((5,), num_tokens=num_tokens), num_tokens, (0,))
    assert allowed(matcher, num_tokens) == {5, last}


def test_it_says_when_a_mask_would_say_nothing_and_who_makes_it():
    free = thinking(1)
    assert free.allows_all
    run(free, START, 4)
    assert not free.allows_all
    assert free.acting is free
    inner = OneOf((0, 0))
    matcher = thinking(1, inner=inner)
    assert matcher.acting is matcher
    run(matcher, START)
    assert matcher.acting is matcher
    assert not matcher.allows_all  # no end id
    run(matcher, 4, STOP)
    assert matcher.acting is inner
    assert thinking(None, inner=inner).acting is inner


@pytest.mark.parametrize(
    "start, end, words",
    [
        ((), (1,), "start mark"),
        ((1,), [], "end mark"),
        ((1, -1), (2,), "start mark"),
        ((1,), (True,), "end mark"),
        ("ab", (1,), "start mark"),
        (1, (2,), "start mark"),
        ((1.0,), (2,), "start mark"),
        ((1,), (1,), "contains"),
        ((1, 2, 3), (2, 3), "contains"),
    ],
)
def test_marks_that_are_none(start, end, words):
    with pytest.raises(OptionError, match=f"thinking_token_ids.*{words}"):
        Marks(start, end)


def test_marks_that_do_not_fit():
    assert Marks(np.array([3, 4]), [np.int64(5)]) == Marks((3, 4), (5,))
    with pytest.raises(OptionError, match="8 is none of the model's 8 tokens"):
        thinking(1, marks=Marks((1,), (8,)))
    with pytest.raises(ParameterError, match="end_token_ids=2"):
        thinking(1, inner=OneOf((0,)), end_ids=(2,))
    assert run(thinking(0, prompt=[START], end_ids=(STOP,))) == {STOP}  # without a grammar: ends behind the thought


tokens = st.integers(0, 3)
marks = st.lists(tokens, min_size=1, max_size=3).map(tuple)
budgets = st.none() | st.integers(0, 4)
prompts = st.lists(tokens | st.just(END), max_size=8)
grammars = st.none() | st.lists(st.lists(tokens, max_size=5).map(tuple), min_size=1, max_size=4)


def pair(start, end):
    assume(place(start, end, 0) is None and place(end, start, 0) is None)
    return Marks(start, end)


@given(marks, marks, budgets, prompts, grammars, st.data())
def test_every_walk_there_and_back_is_the_definition(start, end, budget, prompt, texts, data):
    both, inner = pair(start, end), None if texts is None else OneOf(*texts)
    matcher, output = thinking(budget, prompt, both, inner), []
    for _ in range(data.draw(st.integers(1, 25))):
        right = expected(prompt, output, budget, both, texts)
        assert allowed(matcher) == right
        assert not matcher.allows_all or right == ALL
        assert allowed(matcher.acting) == right
        if output and data.draw(st.integers(0, 4)) == 0:
            num = data.draw(st.integers(0, len(output)))
            matcher.rewind(num)
            del output[len(output) - num :]
            continue
        token_id = data.draw(st.sampled_from(sorted(right)) | st.integers(0, 4) if right else st.integers(0, 4))
        assert matcher.accept(token_id) == (token_id in right)
        output += [token_id] * (token_id in right)
    assert allowed(matcher) == expected(prompt, output, budget, both, texts)


@given(marks, marks, st.integers(0, 4), prompts, st.data())
def test_no_walk_thinks_more_than_the_budget(start, end, budget, prompt, data):
    both = pair(start, end)
    matcher, output = thinking(budget, prompt, both), []
    for _ in range(25):
        token_id = data.draw(st.sampled_from(sorted(allowed(matcher))))
        assert matcher.accept(token_id)
        output.append(token_id)
        turn = turn_of(prompt)
        ids = (*turn, *output)
        inside, at, thought = scan(ids, both, len(turn))
        assert thought - (begun(ids[at:], both.end) if inside else 0) <= budget


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_no_text_has_more_between_its_marks(budget):
    """All outputs of five tokens, counted as a reader counts."""
    num_forced = 0
    for output in itertools.product((0, START, STOP), repeat=5):
        matcher = thinking(budget)
        if all(matcher.accept(token_id) for token_id in output):
            between = "".join(map(str, output)).split(str(START), 1)
            blocks = [] if len(between) == 1 else between[1].split(str(STOP))
            inside, num = True, 0
            for block in blocks:
                if inside:
                    num, inside = num + len(block), False
                elif str(START) in block:
                    num += len(block) - block.index(str(START)) - 1
            assert num <= budget
        else:
            num_forced += 1
    assert num_forced > 0
