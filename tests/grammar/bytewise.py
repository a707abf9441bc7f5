"""What the tests of the llguidance backend share: a backend over bytes, and how far a grammar takes a text."""

from __future__ import annotations

import json

import pytest
from tests.grammar.languages import allowed as ids_allowed
from tests.grammar.walks import BYTES, END, NUM_BYTES

from klero.errors import GrammarError
from klero.grammar import LLGuidance, Source

BACKEND = LLGuidance(BYTES, NUM_BYTES, 2)


def allowed(matcher):
    """The ids of a mask."""
    return ids_allowed(matcher, matcher.batch.num_tokens)


def follow(source, text, backend=BACKEND):
    """How many bytes of a text are taken; "end" if all of them are and it may end there."""
    matcher = backend.compile(source).matcher((END,))
    for index, byte in enumerate(text.encode()):
        if not matcher.accept(byte):
            return index
    return "end" if matcher.accept(END) else "more"


def schema(asked, whitespace=0):
    return Source("json", json.dumps(asked), whitespace)


def rule_of(source, backend=BACKEND):
    with pytest.raises(GrammarError) as caught:
        backend.compile(source)
    assert caught.value.field == source.kind
    return caught.value.rule


LOOP = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
    },
}
"""A schema that only endless texts would meet."""
