"""xgrammar behind the protocol, where it is installed; and what is said where it is not."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.grammar.languages import ENDS, NUM_TOKENS, TOKENS, allowed, may_follow, words_of_length
from tests.grammar.walks import BYTES, END, NUM_BYTES

from klero.errors import GrammarError
from klero.grammar import Source
from klero.grammar.xgrammar import XGrammar

installed = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is missing: pip install '.[xgrammar]'"
)


def test_without_xgrammar_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ImportError, match=r"xgrammar is not installed; klero\[xgrammar\] brings it"):
        XGrammar(BYTES, NUM_BYTES)


@pytest.fixture(scope="module")
def backend():
    return XGrammar(BYTES, NUM_BYTES)


@pytest.fixture(scope="module")
def small():
    return XGrammar(TOKENS, NUM_TOKENS)


def follow(backend, source, text):
    matcher = backend.compile(source).matcher((END,))
    for index, byte in enumerate(text.encode()):
        if not matcher.accept(byte):
            return index
    return "end" if matcher.accept(END) else "more"


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAG = {"structures": [{"begin": "<f=a>", "schema": POINT, "end": "</f>"}], "triggers": ["<f"]}


@installed
@pytest.mark.parametrize(
    "source, text, taken",
    [
        (Source("choice", '["yes", "no\\n"]'), "no\n", "end"),
        (Source("choice", '["yes", "no"]'), "ye", "more"),
        (Source("regex", "^[a-c]+.$"), "abé", "end"),
        (Source("regex", "a."), "a\n", 1),
        (Source("grammar", 'root ::= "(" root ")" | "x" # end'), "((x))", "end"),
        (Source("json", json.dumps(POINT)), '{"x":1}', "end"),
        (Source("json", json.dumps(POINT)), '{ "x":1}', 1),
        (Source("json", json.dumps(POINT), 1), '{ "x": 1}', "end"),
        (Source("json", json.dumps(POINT), 1), '{  "x": 1}', 2),
        (Source("json", '{"type": "string", "enum": ["a", 1]}'), "1", 0),
        (Source("json", '{"type": "string", "format": "date"}'), '"2023-02-29"', 10),
        (Source("json_object"), '{"a":[1,null]}', "end"),
        (Source("json_object"), "[]", 0),
        (Source("structural_tag", json.dumps(TAG)), 'a <f=a>{"x":1}</f> b', "end"),
        (Source("structural_tag", json.dumps(TAG)), 'a <f=a>{ "x":1}</f> b', 8),
        (Source("structural_tag", json.dumps(TAG), 1), 'a <f=a>{ "x":1}</f> b', "end"),
    ],
)
def test_texts_are_taken_as_they_are_meant(backend, source, text, taken):
    assert follow(backend, source, text) == taken


@installed
@pytest.mark.parametrize(
    "source, rule",
    [
        (Source("json", '{"enum": []}'), "enum"),
        (Source("json", '{"type": "strnig"}'), "strnig"),
        (Source("json", '{"type": "integer", "minimum": 5, "maximum": 4}'), "minimum greater than maximum"),
        (Source("json", '{"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]}'), "enum"),
        (Source("json", "false"), "cannot accept any value"),
        (Source("json", '{"not": {}}'), "'not' is not a keyword"),
        (Source("json", '{"type": "integer", "multipleOf": 2}'), "does not hold 'multipleOf'"),
        (Source("json", '{"anyOf": [{"type": "null"}], "minimum": 2}'), "does not hold 'minimum' beside anyOf"),
        (Source("json", '{"minimum": 2}'), "does not hold 'minimum' beside no type"),
        (Source("json", '{"type": "string", "pattern": "a", "maxLength": 2}'), "a length beside a pattern"),
        (
            Source("json", '{"type": "object", "properties": {"a": {}}, "additionalProperties": true}'),
            "lets other properties take the names",
        ),
        (Source("regex", "^a|b$"), "drops ^ and $"),
        (Source("regex", "a("), "parenthesis"),
        (Source("regex", "[" * 20_000), "a set that '[' begins is not closed"),
        (Source("regex", "a?" * 1001), "may be left out"),
        (Source("json", '{"type": "string", "pattern": "^[b-a]$"}'), "the set '[b-a]' in a pattern cannot be read"),
        (Source("grammar", 'start: "a"'), "is Lark"),
        (Source("grammar", 'root ::= "a'), "is not understood"),
        (Source("grammar", 'root ::= "a" root'), "has no end"),
    ],
)
def test_what_would_not_be_held_is_refused(backend, source, rule):
    with pytest.raises(GrammarError) as caught:
        backend.compile(source)
    assert caught.value.field == source.kind
    assert rule in caught.value.rule


WORDS = [word for word in words_of_length("ab", 10) if re.fullmatch("a*(ab|ba){0,2}", word)]
LANGUAGES = [
    (Source("choice", '["a", "ab", "abba", "é"]'), {text.encode() for text in ("a", "ab", "abba", "é")}),
    (Source("regex", "a*(ab|ba){0,2}"), {word.encode() for word in WORDS}),
    (Source("grammar", 'root ::= "a" root "b" | ""'), {b"a" * n + b"b" * n for n in range(12)}),
]


@installed
@given(st.sampled_from(LANGUAGES), st.lists(st.integers(-4, 10**6), max_size=10))
def test_any_walk_is_as_a_matcher_that_begins_anew(small, of, steps):
    """A negative step takes back so many tokens."""
    source, language = of
    grammar, taken = small.compile(source), []
    matcher = grammar.matcher(ENDS)
    for step in steps:
        found = sorted(allowed(matcher))
        if step < 0:
            num_tokens = min(-step, len(taken))
            matcher.rewind(num_tokens)
            del taken[len(taken) - num_tokens :]
        elif len(taken) < 3:  # the words known to the reference are short
            taken.append(found[step % len(found)])
            assert matcher.accept(taken[-1])
        anew = grammar.matcher(ENDS)
        assert all(anew.accept(token_id) for token_id in taken)
        assert allowed(matcher) == allowed(anew)
        if len(taken) < 3:
            right = may_follow(language, taken)
            assert allowed(matcher) <= right  # of a token that ends several rules its masks do not know
            assert source.kind == "grammar" or allowed(matcher) == right
            assert not any(matcher.accept(i) for i in set(range(NUM_TOKENS)) - right)


@installed
def test_masks_of_a_batch_are_each_ones_own(small):
    grammar = small.compile(LANGUAGES[0][0])
    matchers = [grammar.matcher(ENDS) for _ in range(3)]
    assert matchers[1].accept(2)
    masks = np.full((3, 1), -1, np.int32)
    assert small.fill_all(matchers, masks) == [None] * 3
    assert masks[0] == masks[2] != masks[1]
