"""Structural tags: free text, and structures that a trigger begins."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.grammar.languages import allowed
from tests.grammar.walks import BYTES, END, NUM_BYTES

from klero.errors import GrammarError
from klero.finish import TokenBytes
from klero.grammar import LLGuidance, Source

BACKEND = LLGuidance(BYTES, NUM_BYTES)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAG = {
    "structures": [
        {"begin": "<function=a>", "schema": POINT, "end": "</function>"},
        {"begin": "<function=b>", "schema": {"enum": [1, "]]"]}, "end": ""},
        {"begin": "[[", "schema": True, "end": "]]"},
    ],
    "triggers": ["<function", "[["],
}


def source(tag, whitespace=0):
    return Source("structural_tag", json.dumps(tag), whitespace)


GRAMMARS = {whitespace: BACKEND.compile(source(TAG, whitespace)) for whitespace in (0, 1)}


def follow(text, grammar=GRAMMARS[0]):
    """How many bytes of a text are taken; "end" if all of them are and it may end there."""
    matcher = grammar.matcher((END,))
    for index, byte in enumerate(text.encode()):
        if not matcher.accept(byte):
            return index
    return "end" if matcher.accept(END) else "more"


@pytest.mark.parametrize(
    "text, taken",
    [
        ("", "end"),
        ("héllo <b> {]\n", "end"),
        ("hello <func", "end"),  # free until the trigger is complete
        ("hello <function", "more"),
        ("hello <functions", 15),
        ("<function=c>", 10),
        ('a<function=a>{"x":1}</function> and', "end"),
        ('a<function=a>{"x":1}</function', "more"),
        ('a<function=a>{"y":1}', 15),
        ('<function=a>{"x":1}</function><function=b>1[[null]]', "end"),
        ('<function=b>"]]" then <f', "end"),
        ("<function=b>2", 12),
        ("<<function=b>1", "end"),
        ("[[[1,2]]]", "end"),  # the third ] is free text
        ('[[{"a":"]]"}]]', "end"),
        ("[ [[[ ]]", 5),
        ('<function=a>{ "x":1}</function>', 13),
    ],
)
def test_a_text_is_free_until_a_trigger(text, taken):
    assert follow(text) == taken


@pytest.mark.parametrize(
    "text, taken",
    [
        ('<function=a>{ "x" : 1 }</function>', "end"),
        ('<function=a>{  "x":1}</function>', 14),
        ('<function=a> {"x":1}</function>', 12),
        ("a  b [[[ 1, 2 ]]] c", "end"),
    ],
)
def test_whitespace_is_bounded_in_structures_only(text, taken):
    assert follow(text, GRAMMARS[1]) == taken


FREE = st.text(alphabet="<[f{ é\n", max_size=8)
STRUCTURES = st.sampled_from(['<function=a>{"x":-5}</function>', "<function=b>1", '[["]]"]]', "[[[[]]]]"])


def free(text):
    return "<function" not in text and "[[" not in text


@given(st.lists(st.tuples(FREE.filter(free), STRUCTURES), max_size=4), FREE.filter(free))
def test_any_mixture_of_texts_and_structures_is_taken(parts, last):
    texts = [before.rstrip("[") + structure for before, structure in parts]
    assert follow("".join(texts) + last) == "end"


def test_a_token_may_span_text_begin_schema_and_end():
    texts = ["so <fun", 'ction=a>{"x', '":1}</function>x<', "function", '=b>"]]"[[', "null]", "]<end>", "</s>"]
    backend = LLGuidance(TokenBytes.from_list([text.encode() for text in texts], [6, 7]), len(texts))
    matcher = backend.compile(source(TAG)).matcher((7,))
    free = {0, 1, 2, 3, 4, 5, 7}
    steps = [(0, free), (1, {2}), (2, free), (3, {4}), (4, {2, 5})]  # the 2 begins a string
    assert allowed(matcher, 8) == free
    for token_id, after in steps:
        assert matcher.accept(token_id)
        assert allowed(matcher, 8) == after, token_id
    matcher.rewind(3)
    assert allowed(matcher, 8) == {2}


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"triggers": ["<function", "[[", "<f"]}, "the trigger '<f' is in the trigger '<function'"),
        ({"triggers": ["<function"]}, "no trigger begins '[['"),
        ({"triggers": ["<function", "[[", "q"]}, "no structure begins with the trigger 'q'"),
        ({"triggers": ["<function", "[[", ""]}, "a trigger is empty"),
        ({"structures": [{"begin": "[[", "schema": {"not": {}}, "end": ""}], "triggers": ["[["]}, "'not'"),
        ({"structures": [{"begin": "[[", "schema": False, "end": ""}], "triggers": ["[["]}, "no JSON meets it"),
        ({"structures": [{"begin": "[[", "schema": {"enum": []}, "end": ""}], "triggers": ["[["]}, "anyOf is empty"),
    ],
)
def test_what_cannot_be_told_apart_or_met_is_refused(change, rule):
    with pytest.raises(GrammarError) as caught:
        BACKEND.compile(source({**TAG, **change}))
    assert caught.value.field == "structural_tag"
    assert rule in caught.value.rule
