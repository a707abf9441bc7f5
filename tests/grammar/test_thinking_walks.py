"""Thinking, step by step and back, is what the whole sequence says, and never more than the budget."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.grammar.thinks import ALL, END, START, STOP, OneOf, allowed, begun, expected, place, scan, thinking, turn_of

from klero.grammar.thinking import Marks

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
