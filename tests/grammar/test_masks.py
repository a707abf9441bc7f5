"""Masks against all words of small languages, and against matchers that begin anew."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.grammar.languages import ENDS, NUM_TOKENS, TOKENS, allowed, ids_of, may_follow, words_of_length

from klero.errors import OptionError
from klero.grammar import LLGuidance, Source

BACKEND = LLGuidance(TOKENS, NUM_TOKENS, 2)
CHOICES = ["a", "ab", "abba", "bb", "é", "éa", "c"]
REGEXES = [  # with the letters that matter, and how long words have to be for two tokens and a third
    ("(a|b)*", "ab", 10),
    ("a+b?", "ab", 10),
    ("(ab|ba){1,2}", "ab", 4),
    ("[^b]é?", "abcé", 2),
    ("(?:a?){3}b", "ab", 4),
    ("b(aa)*|é", "abé", 8),
    ("(a|a)*b", "ab", 10),
]
NESTED = ['root ::= "a" root "b" | ""', 'start: "a" start "b" | ""']


def languages():
    """Sources and their words."""
    yield Source("choice", json.dumps(CHOICES)), {word.encode() for word in CHOICES}
    for regex, letters, most in REGEXES:
        words = words_of_length(letters, most)
        yield Source("regex", regex), {word.encode() for word in words if re.fullmatch(regex, word)}
    for text in NESTED:
        yield Source("grammar", text), {b"a" * n + b"b" * n for n in range(12)}


LANGUAGES = [(BACKEND.compile(source), words, source.text) for source, words in languages()]


@pytest.mark.parametrize("grammar, language, text", LANGUAGES, ids=[text for *_, text in LANGUAGES])
def test_a_mask_is_what_some_word_goes_on_with(grammar, language, text):
    """Every sequence of up to two tokens, and everything that may follow it."""
    left, seen = [()], 0
    while left:
        taken = left.pop()
        matcher = grammar.matcher(ENDS)
        assert all(matcher.accept(token_id) for token_id in taken)
        found = allowed(matcher)
        assert found == may_follow(language, taken), taken
        for token_id in set(range(NUM_TOKENS)) - found:
            assert not matcher.accept(token_id)
        assert allowed(matcher) == found  # what was refused changed nothing
        seen += 1
        if len(taken) < 2:
            left.extend((*taken, token_id) for token_id in sorted(found))
    assert seen > 3


STEPS = st.lists(
    st.one_of(st.integers(0, 10**6), st.tuples(st.just("rewind"), st.integers(0, 5)), st.just("refused")), max_size=12
)


@given(st.sampled_from(LANGUAGES), STEPS)
def test_any_walk_is_as_a_matcher_that_begins_anew(of, steps):
    grammar, language, _ = of
    matcher, taken = grammar.matcher(ENDS), []
    for step in steps:
        found = sorted(allowed(matcher))
        if step == "refused":
            others = set(range(-2, NUM_TOKENS + 2)) - set(found)
            assert not any(matcher.accept(token_id) for token_id in others)
        elif isinstance(step, tuple):
            num_tokens = min(step[1], len(taken))
            matcher.rewind(num_tokens)
            del taken[len(taken) - num_tokens :]
        elif len(taken) < 3:  # the words known to the reference are short
            taken.append(found[step % len(found)])
            assert matcher.accept(taken[-1])
        anew = grammar.matcher(ENDS)
        assert all(anew.accept(token_id) for token_id in taken)
        assert allowed(matcher) == allowed(anew)
        if len(taken) < 3:
            assert allowed(matcher) == may_follow(language, taken)


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=8), min_size=2, max_size=6), st.sampled_from(LANGUAGES))
def test_siblings_do_not_influence_each_other(walks, of):
    grammar = of[0]
    matchers = [grammar.matcher(ENDS) for _ in walks]
    taken = [[] for _ in walks]
    masks = np.empty((len(walks), 1), np.int32)
    for step in range(8):
        masks[:] = -1
        assert BACKEND.fill_all(matchers, masks) == [None] * len(walks)
        for r, walk in enumerate(walks):
            alone = grammar.matcher(ENDS)
            assert all(alone.accept(token_id) for token_id in taken[r])
            found = sorted(ids_of(masks[r]))
            assert found == sorted(allowed(alone))
            if step < len(walk):
                taken[r].append(found[walk[step] % len(found)])
                assert matchers[r].accept(taken[r][-1])


@pytest.mark.parametrize("num_tokens", [-1, 3])
def test_no_more_can_be_taken_back_than_was_taken(num_tokens):
    matcher = BACKEND.compile(Source("regex", "a*")).matcher(ENDS)
    assert matcher.accept(0)
    assert matcher.accept(6)
    with pytest.raises(OptionError, match=f"num_tokens={num_tokens}: must be between 0 and the 2 tokens taken"):
        matcher.rewind(num_tokens)
    assert allowed(matcher) == set(ENDS)
    matcher.rewind(2)
    assert matcher.accept(0)
