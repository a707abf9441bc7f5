"""Thinking is held to its budget, and the grammar begins behind it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.grammar.thinks import ALL, END, PAIRS, START, STOP, OneOf, V, allowed, run, thinking

from klero.errors import OptionError, ParameterError
from klero.grammar.thinking import Marks


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
    for output in ((0,), (6, 3, 4, 0), (6, 3, 4, 0, 5, 6, 3, 4)):
        assert run(thinking(1, prompt=[3, 4, 0, 5], marks=PAIRS)) == ALL  # the prompt's tokens are not counted
        assert run(thinking(1, prompt=[3, 4, 0, 5], marks=PAIRS), *output) == {5}
    assert run(thinking(0, prompt=[3, 3, 4, 5, 5], marks=PAIRS)) == {6}
    assert run(thinking(0, prompt=[3, 3, 4, 5, 5, 6], marks=PAIRS)) == ALL


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


def test_a_grammar_that_gave_up_at_the_start_mark_begins_anew_behind_the_end_mark():
    matcher = thinking(1, marks=Marks((3, 4, 0), (5, 6)), inner=OneOf((3, 3)))
    assert run(matcher, 3) == {3, 4}
    assert run(matcher, 4) == {0}
    assert run(matcher, 0, 5, 6) == {3}
    matcher.rewind(3)
    assert run(matcher) == {0}
    matcher.rewind(1)
    assert run(matcher, 3) == {END}


def test_a_later_mark_is_none_for_a_grammar():
    matcher = thinking(1, inner=OneOf((START, START), (0, START, 0)))
    assert run(matcher, 0, START, 0) == {END}
    assert run(thinking(0, prompt=[START], inner=OneOf((STOP, START, STOP))), STOP, STOP, START) == {STOP}


def test_what_may_not_come_changes_nothing():
    matcher = thinking(1, marks=PAIRS, inner=OneOf((3, 0)))
    for token_id in (-1, V, END, 0, 4):
        assert not matcher.accept(token_id)
        assert run(matcher) == {3}
    assert not any(thinking(1).accept(token_id) for token_id in (-1, V))
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


def test_an_end_id_of_the_request_ends_no_turn_of_the_prompt():
    """4 may be the line break behind the start mark: the prompt still thinks."""
    assert run(thinking(0, prompt=[START, 4], end_ids=(4,))) == {STOP}
    assert run(thinking(0, prompt=[START, 4], end_ids=(), turn_end_ids=(4,))) == ALL
