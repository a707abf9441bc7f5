"""Adversarial grammars: bounded time, or an error; and a row that fails alone."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from tests.grammar.bytewise import BACKEND, LOOP, allowed, schema
from tests.grammar.walks import BYTES, END, NUM_BYTES

from klero.errors import GrammarError
from klero.grammar import LLGuidance, Source
from klero.grammar.llguidance import Limits

LIMIT = 10.0  # seconds; none takes more than two on an idle machine, and what is not bounded takes hours


def nested(depth):
    asked = {"type": "string"}
    for level in range(depth // 2):
        asked = {"type": "object", "properties": {f"p{level}": asked}, "required": [f"p{level}"]}
    return asked


ADVERSARIAL = {
    "alternatives": Source("regex", "(a|a)*b"),
    "nested stars": Source("regex", "((a*)*)*b"),
    "nested counts": Source("regex", "(a{1,1000}){1,1000}"),
    "subsets": Source("regex", "[ab]*a[ab]{20}"),
    "a long distance": Source("regex", "(?s:.*)a(?s:.){500}"),
    "a large count": Source("regex", "a{0,1000000000}"),
    "optional and not": Source("regex", "a?" * 1000 + "a" * 1000),
    "long": Source("regex", "(?:ab|c)d" * 20000),
    "deep groups": Source("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "choices": Source("choice", json.dumps([f"word {i} {i * 7919 % 10007}" for i in range(10_000)])),
    "enum": schema({"enum": [f"word {i} {i * 7919 % 10007}" for i in range(10_000)]}),
    "deep schema": schema(nested(64)),
    "many properties": schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}),
    "many items": schema({"type": "array", "items": {"type": "array", "minItems": 4000}, "minItems": 4000}),
    "long strings": schema({"type": "string", "minLength": 1000, "maxLength": 32_768}),
    "loop": schema(LOOP),
    "doubling": schema({"$ref": "#/$defs/20", "$defs": {"0": {"type": "integer"}} | {
        str(i): {"allOf": [{"$ref": f"#/$defs/{i - 1}"}] * 2} for i in range(1, 21)}}),
    "product": schema({"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]}
                                 for i in range(10)]}),
    "chain of rules": Source("grammar", "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(5000))
                             + 'r5000 ::= "b"'),
    "deep rule": Source("grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep GBNF": Source("grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "ambiguous": Source("grammar", 'start: s\ns: s s s | s s | "a" | "b" | '),
    "chain of references": schema({"$ref": "#/$defs/0", "$defs": {"5000": {"type": "integer"}} | {
        str(i): {"properties": {"b": {"$ref": f"#/$defs/{i + 1}"}}, "type": "object"} for i in range(5000)}}),
    "chain of terminals": Source("grammar", "start: T0\n" + "".join(f'T{i}: "a" T{i + 1}\n' for i in range(5000))
                                 + 'T5000: "b"'),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_an_adversarial_grammar_takes_bounded_time_or_is_refused(name):
    start, error = time.perf_counter(), None
    try:
        matcher = BACKEND.compile(ADVERSARIAL[name]).matcher((END,))
        for _ in range(20):
            found = sorted(allowed(matcher) - {END})
            if not found:
                break
            assert matcher.accept(found[len(found) // 2])
    except GrammarError as refusal:
        error = refusal
    assert time.perf_counter() - start < LIMIT
    assert error is None or len(error.rule) < 500


def test_a_row_that_becomes_too_complex_fails_alone_and_can_be_taken_back():
    backend = LLGuidance(BYTES, NUM_BYTES, 2, limits=Limits(step_fuel=20_000))
    hard = backend.compile(Source("regex", "(a{1,1000}){1,1000}")).matcher((END,))
    easy = backend.compile(Source("regex", "[a-z]+")).matcher((END,))
    masks, num_taken = np.zeros((3, 9), np.int32), 0
    errors = [None]
    while errors[0] is None and num_taken < 500:
        masks[:] = -1
        errors = backend.fill_all([hard, easy, hard2(backend)], masks)
        assert errors[1:] == [None, None]
        assert easy.accept(ord("a"))
        if errors[0] is None:
            assert hard.accept(ord("a"))
            num_taken += 1
    assert isinstance(errors[0], GrammarError)
    assert "cannot be followed here" in errors[0].rule
    assert not masks[0].any()
    assert masks[1].any()
    hard.rewind(num_taken)
    assert allowed(hard) == {ord("a")}


def hard2(backend):
    return backend.compile(Source("choice", '["x"]')).matcher((END,))


def test_what_a_lexer_remembers_is_no_limit_for_others():
    """The states that all matchers of a grammar share fill up; each goes on with new ones."""
    backend = LLGuidance(BYTES, NUM_BYTES, limits=Limits(lexer_states=300))
    grammar = backend.compile(Source("regex", "(?:[a-z]{1,30}x[a-y]{10,20}|[a-w]{3,50}yy){1,40}"))
    chance = np.random.default_rng(1)
    for _ in range(4):
        matcher, taken = grammar.matcher((END,)), []
        for _ in range(200):
            found = sorted(allowed(matcher) - {END})
            if not found:
                break
            taken.append(int(chance.choice(found)))
            assert matcher.accept(taken[-1])
        anew = BACKEND.compile(Source("regex", "(?:[a-z]{1,30}x[a-y]{10,20}|[a-w]{3,50}yy){1,40}")).matcher((END,))
        assert all(anew.accept(token_id) for token_id in taken)
        assert allowed(anew) == allowed(matcher)
