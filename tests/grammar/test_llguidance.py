"""llguidance behind the protocol: small vocabularies by eye, what is refused, and what is bounded."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.grammar.languages import allowed as ids_allowed
from tests.grammar.walks import BYTES, END, NUM_BYTES

from klero.errors import GrammarError
from klero.finish import TokenBytes
from klero.grammar import LLGuidance, Source
from klero.grammar.llguidance import Limits

BACKEND = LLGuidance(BYTES, NUM_BYTES, 2)
LIMIT = 3.0  # seconds; a second on an idle machine


def backend_of(*texts, special=(), num_tokens=None):
    tokens = TokenBytes.from_list([text if isinstance(text, bytes) else text.encode() for text in texts], special)
    return LLGuidance(tokens, num_tokens or len(texts))


def allowed(matcher):
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


def test_a_choice_by_eye():
    backend = backend_of("y", "es", "yes", "no", "</s>", "x", special=[4])
    matcher = backend.compile(Source("choice", '["yes", "no"]')).matcher((4,))
    assert allowed(matcher) == {0, 2, 3}
    assert matcher.accept(0)
    assert allowed(matcher) == {1}
    assert not matcher.accept(3)
    assert matcher.accept(1)
    assert allowed(matcher) == {4}
    matcher.rewind(2)
    assert matcher.accept(3)
    assert allowed(matcher) == {4}


def test_a_number_by_eye():
    backend = backend_of(*"0123456789", "12", "1x", "</s>", special=[12])
    matcher = backend.compile(Source("regex", "[0-9]+")).matcher((12,))
    assert allowed(matcher) == set(range(11))
    assert matcher.accept(10)
    assert allowed(matcher) == {*range(11), 12}


def test_after_the_end_only_the_end_ids_are_allowed():  # GR-03
    backend = backend_of("{", "}", "</s>", "x", "{}", "a", "b", "c", "d", "<end>", special=[2, 9])
    matcher = backend.compile(Source("grammar", 'start: "{}"')).matcher((2, 9))
    assert allowed(matcher) == {0, 4}
    assert matcher.accept(4)
    for _ in range(3):
        assert allowed(matcher) == {2, 9}
        assert not matcher.accept(0)
        assert matcher.accept(9)
    matcher.rewind(3)
    assert allowed(matcher) == {2, 9}
    matcher.rewind(1)
    assert allowed(matcher) == {0, 4}
    assert not matcher.accept(2)


def test_a_draft_is_followed_and_taken_back():  # GR-04
    backend = backend_of("[", "]", "x", *"0123456789", "</s>", special=[13])
    matcher = backend.compile(Source("regex", r"\[[0-9]\]")).matcher((13,))
    assert allowed(matcher) == {0}
    assert matcher.accept(0)
    assert allowed(matcher) == set(range(3, 13))
    assert not matcher.accept(2)  # the draft breaks the grammar here
    assert allowed(matcher) == set(range(3, 13))
    matcher.rewind(1)
    assert allowed(matcher) == {0}
    assert matcher.accept(0)
    assert matcher.accept(7)  # the token that the target draws instead
    assert allowed(matcher) == {1}


def test_an_end_id_is_no_text_even_where_its_text_fits():
    backend = backend_of("a", "b", "ab")
    matcher = backend.compile(Source("regex", "(ab)+")).matcher((2,))
    assert allowed(matcher) == {0}
    assert not matcher.accept(2)
    assert matcher.accept(0)
    assert matcher.accept(1)
    assert allowed(matcher) == {0, 2}


def test_without_end_ids_nothing_follows_the_end():
    matcher = backend_of("a").compile(Source("regex", "a")).matcher(())
    assert matcher.accept(0)
    assert allowed(matcher) == set()


def test_special_tokens_match_no_text():
    backend = backend_of("a", "</s>", "<", "/s>", "\\xff", b"\xff</s>", special=[1, 5])
    for text in ("a</s>", "a.*", "a(?s:.)*", "a[^a]*"):
        matcher = backend.compile(Source("regex", text)).matcher(())
        assert matcher.accept(0)
        assert not allowed(matcher) & {1, 5}
        assert not matcher.accept(1)
    rule_of(Source("regex", r"a(?-u:\xff)</s>"), backend)
    text = 'start: "a" T\nT: /(?s-u:.)*/\n%llguidance {"allow_invalid_utf8": true}'
    rule_of(Source("grammar", text), backend)  # its author's own options come before ours


def test_a_lark_grammar_may_name_a_special_token():
    backend = backend_of("a", "<|tool|>", "</s>", special=[1, 2])
    matcher = backend.compile(Source("grammar", 'start: <|tool|> "a"')).matcher((2,))
    assert allowed(matcher) == {1}
    assert matcher.accept(1)
    assert allowed(matcher) == {0}
    matcher.rewind(1)
    assert allowed(matcher) == {1}
    assert "unknown special token" in rule_of(Source("grammar", 'start: <|other|> "a"'), backend)


def test_ids_without_text_are_never_allowed():
    backend = backend_of("a", "", "b", num_tokens=70)
    matcher = backend.compile(Source("regex", "(?s:.)*")).matcher((69,))
    assert allowed(matcher) == {0, 2, 69}
    assert not any(matcher.accept(token_id) for token_id in (1, 3, 68, 70, -1, 10**9))
    assert allowed(matcher) == {0, 2, 69}


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 63, 64, 65, 257])
def test_no_bit_beyond_the_vocabulary_is_set(num_tokens):
    backend = LLGuidance(TokenBytes.from_list([bytes([i % 128]) for i in range(num_tokens)]), num_tokens, 2)
    grammar = backend.compile(Source("regex", "(?s:.)*"))
    matchers = [grammar.matcher((num_tokens - 1,)) for _ in range(3)]
    assert matchers[1].accept(num_tokens - 1)
    masks = np.full((3, -(-num_tokens // 32)), -1, np.int32)
    assert backend.fill_all(matchers, masks) == [None] * 3
    flags = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert flags.sum(axis=1).tolist() == [num_tokens, 1, num_tokens]
    assert not flags[:, num_tokens:].any()


def test_a_character_may_be_split_over_tokens():
    backend = backend_of(b"\xf0\x9f", b"\x98\x80", b"\x98", b"\x80", "é", b"\xc3", b"\xa9", "a")
    matcher = backend.compile(Source("regex", "[^a]+")).matcher(())
    assert allowed(matcher) == {0, 4, 5}
    assert matcher.accept(0)
    assert allowed(matcher) == {1, 2, 3, 6}
    assert matcher.accept(2)
    assert allowed(matcher) == {2, 3, 6}
    matcher.rewind(2)
    assert matcher.accept(5)
    assert allowed(matcher) == {2, 3, 6}


def test_a_forced_text_may_be_written_in_any_tokens():
    matcher = backend_of("a", "ab", "abc", "b", "c", "bc").compile(Source("choice", '["abc"]')).matcher(())
    assert allowed(matcher) == {0, 1, 2}
    assert matcher.accept(0)
    assert allowed(matcher) == {3, 5}


@pytest.mark.parametrize(
    "asked",
    [
        {"enum": []},
        {"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]},
        {"type": "strnig"},
        {"type": "integer", "minimum": 5, "maximum": 4},
    ],
)
def test_a_schema_that_nothing_meets_is_refused(asked):  # GR-09
    assert rule_of(schema(asked))


LOOP = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
    },
}


@pytest.mark.parametrize(
    "asked, rule",
    [
        (False, "no JSON meets it"),
        (LOOP, "no JSON meets it"),
        ({"$ref": "#"}, "no JSON meets it"),
        ({"not": {}}, r"$: 'not' is not a keyword"),
        ({"properties": {"a": {"uniqueItems": True}}}, r"$.properties.a: 'uniqueItems' is not a keyword"),
        ({"type": "string", "maxlength": 3}, r"$: 'maxlength' is not a keyword"),
        ({"x-guidance": {"lenient": True}, "not": {}}, r"$: 'x-guidance' is not a keyword"),
        ({"type": "string", "format": "unknown"}, r"$.format: the format 'unknown' is not known"),
        ({"const": 2**53 + 1}, r"$.const: 9007199254740993 is beyond"),
        ({"enum": [0.12345678901234567]}, "$.enum: 0.12345678901234567 has more than 15 digits"),
        ({"const": {"a": ["\x01"]}}, r"$.const: '\x01' has a control character"),
        ({"type": "object", "minProperties": 2}, "$.minProperties: can be held up to 1"),
        ({"type": "array", "maxItems": 10**9}, "$.maxItems: must be an integer between 0 and 4096"),
        ({"type": "integer", "multipleOf": 104857.6}, "$.multipleOf: its digits may be 20000 at most"),
        ({"type": "string", "minLength": -1}, "$.minLength: must be an integer between 0 and 32768"),
        ({"type": "string", "pattern": "[^a&&b]"}, "$.pattern: the set '[^a&&b]' has more than one meaning"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "string", "pattern": r"[\x00-\x1f]"}, "names control characters"),
        ({"type": "string", "pattern": r"\p{Cc}"}, "the categories L, M, N, P, S and Z only"),
        ({"type": "string", "pattern": "(?i)a"}, "flags as in '(?i'"),
        ({"items": [{"type": "integer"}]}, "$.items: a schema is an object, true or false"),
        ({"required": "ab"}, "$.required: must be a list of names"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
        ({"$ref": "https://example.com/a.json"}, "Resource 'https://example.com/a.json'"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "no JSON meets it"),
        ({"type": "integer", "exclusiveMinimum": 4, "maximum": 9, "multipleOf": 2.5}, "no JSON meets it"),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_place(asked, rule):
    if asked == {"type": "integer", "exclusiveMinimum": 4, "maximum": 9, "multipleOf": 2.5}:
        assert follow(schema(asked), "5") == "end"
        asked = {**asked, "exclusiveMinimum": 5}
    assert rule in rule_of(schema(asked))


@pytest.mark.parametrize(
    "asked, text, taken",
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061":"x"}', 3),  # a's name in other letters
        ({"properties": {"a": False}}, '{"\\u0061":1}', 3),
        ({"type": "object", "patternProperties": {"^a": False}}, '{"\\u0061b":1}', 3),
        ({"type": "string", "format": "date"}, '"2023-02-29"', 10),
        ({"type": "string", "format": "date"}, '"2024-02-29"', "end"),
        ({"type": "string", "format": "date"}, '"1900-02-29"', 10),
        ({"type": "string", "format": "date"}, '"0000-01-01"', 4),
        ({"type": "string", "format": "date-time"}, '"2024-02-29T23:59:59.5+01:00"', "end"),
        ({"type": "string", "format": "time"}, '"23:59:60Z"', 7),
        ({"type": "string", "format": "date", "pattern": "^2"}, '"1999-01-01"', 1),
        ({"type": "string", "maxLength": 1}, '"😀"', "end"),
        ({"type": "string", "minLength": 2}, '"é"', 3),
        ({"type": "string", "pattern": "b"}, '"abc"', "end"),
        ({"type": "string", "pattern": r"^\d.$"}, '"٣x"', 1),
        ({"type": "string", "pattern": "^.$"}, '"\\r"', 2),
        ({"type": "string", "pattern": "^a$"}, '"a\\n"', 2),
        ({"type": "string", "pattern": r"^\s$"}, '"\x85"', 2),
        ({"type": "string", "pattern": '^[^"]*$'}, '"a\\""', 3),
        ({"type": "string", "pattern": r"^[^\\]$"}, '"\\\\"', 2),
        ({"type": "string", "pattern": r'^[^\n"]$'}, '"\\t"', "end"),
        ({"type": "string", "pattern": r"^\P{P}$"}, '"\\""', 2),
        ({"type": "string", "pattern": r"^\P{P}\p{Lu}$"}, '"é\u00c9"', "end"),
        ({"type": "number", "exclusiveMaximum": 1}, "0.999999999999999", "more"),
        ({"type": "number", "exclusiveMaximum": 1}, "0.99999999999999", "end"),
        ({"type": "number", "maximum": 0.9999999999999999}, "1", 0),
        ({"type": "number", "exclusiveMinimum": 0}, "0.00000000000001", "end"),
        ({"type": "number", "exclusiveMinimum": 0}, "0.000000000000009", "more"),
        ({"type": "number", "exclusiveMinimum": 0, "minimum": 2}, "1", "more"),
        ({"type": "number", "minimum": -2.5, "exclusiveMaximum": 1e6}, "999999.999999999", "end"),
        ({"minimum": 3, "exclusiveMinimum": True}, "3", "more"),
        ({"type": ["integer", "null"], "exclusiveMaximum": 3, "maximum": 7}, "3", 0),
        ({"type": "string", "pattern": r"^\S$"}, '"\ufeff"', 3),
        ({"type": "string", "pattern": r"^[^\s]$"}, '"\x85"', 2),
        ({"type": "string", "pattern": r"^[^\S]$"}, '"\x85"', 2),
        ({"type": "string", "pattern": r"^\s[\s-][^\s][\S]\\s$"}, '"\u00a0-aa\\\\s"', "end"),
        ({"type": "string", "pattern": "^.[.]$"}, '"x."', "end"),
        ({"type": "integer"}, "1.0", 1),
        ({"type": "number"}, "-1.5e+3", "end"),
        ({"type": "number"}, "1.", "more"),
        ({"type": "array", "uniqueItems": False}, "[1,1]", "end"),
        ({"title": "x", "default": 3, "x-order": 1, "deprecated": True, "type": "null"}, "null", "end"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": LOOP["$defs"], "type": "object"}, '{"a":', 3),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": LOOP["$defs"], "type": "object"}, '{"c":1}', "end"),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]", "end"),
        (True, '{"a":[1,null]}', "end"),
    ],
)
def test_a_schema_is_held_as_it_is_meant(asked, text, taken):
    assert follow(schema(asked), text) == taken


@pytest.mark.parametrize(
    "whitespace, text, taken",
    [
        (0, '{"a":[1,2]}', "end"),
        (0, '{ "a":1}', 1),
        (1, '{ "a" : [ 1 , 2 ] }', "end"),
        (1, '{\n"a":1}', "end"),
        (1, '{  "a":1}', 2),
        (1, ' {"a":1}', 0),
        (1, '{"a":1} ', 7),
        (1, '{\t"a":1}', 1),
        (3, '{ \n "a":1}', "end"),
        (3, '{    "a":1}', 4),
    ],
)
def test_whitespace_is_bounded_everywhere(whitespace, text, taken):
    assert follow(Source("json_object", "", whitespace), text) == taken


@pytest.mark.parametrize(
    "text, read, taken",
    [
        ("^a|b$", "b", "end"),
        (r"a/b\/c", "a/b/c", "end"),
        ("a\nb", "a\nb", "end"),
        (r"a\\", "a\\", "end"),
        ("a.b", "a\nb", 1),
        ("", "", "end"),
        ("/*", "/", "end"),
        ("a#b", "a#b", "end"),
        ('a"b', 'a"b', "end"),
        (r"\[/]", "[/]", "end"),
        ("/\nT: /b", "/\nT: /b", "end"),
    ],
)
def test_a_regex_matches_the_whole_text(text, read, taken):
    assert follow(Source("regex", text), read) == taken


@pytest.mark.parametrize("text", ["a(", "[", "a\\", "a)(b", "a{2,1}", r"\bа", "(a)\\1", "a^b", "(?x)a\nb", "*"])
def test_a_malformed_regex_is_refused(text):
    assert rule_of(Source("regex", text))


def test_the_texts_of_a_choice_are_no_patterns():
    texts = ["a.*", 'say "hi"\n', "\\d/", "#x", "é\x01", "a"]
    source = Source("choice", json.dumps(texts))
    assert [follow(source, text) for text in texts] == ["end"] * len(texts)
    assert follow(source, "ab") == 1


@pytest.mark.parametrize(
    "text, read, taken",
    [
        ('root ::= "a" rest? # a comment\nrest ::= [^\\n"b-d]{2,3} |\n  "\\x41\\u00e9"', "aAé", "end"),
        ('root ::= "a" rest? # a comment\nrest ::= [^\\n"b-d]{2,3} |\n  "\\x41\\u00e9"', "ac", 1),
        ('root ::= [a-z]* "end"', "spen", "more"),
        ('root ::= [a-z]* "end"', "endend", "end"),
        ('root ::= "(" root ")" | x\nx ::= .', "((é))", "end"),
        ('root ::= ("a" | )+ "b"', "aab", "end"),
        ('root ::= [\\]\\-^a] [-x] "\\\\"', "]-\\", "end"),
        ('root-1 ::= "x"\nroot ::= root-1 root-1', "xx", "end"),
        ('start: A "b"\nA: /a+/', "aab", "end"),
        ('start: %json {"type": "integer"}', "-12", "end"),
    ],
)
def test_grammars_in_both_languages(text, read, taken):
    assert follow(Source("grammar", text), read) == taken


@pytest.mark.parametrize(
    "text, rule",
    [
        ("root ::= y", "'y', which 'root' uses, is missing"),
        ('a ::= "b"', "no rule is called root"),
        ('root ::= "a', "is not understood"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "may not stand here"),
        ('root ::= * "a"', "may not stand here"),
        ('root ::= "a"\nroot ::= "b"', "there twice"),
        ('root ::= "\\q"', "the escape"),
        ('root ::= "a" root', "'root' has no end"),
        ('root ::= "a" | (b? | "c") b\nb ::= ("x" root | "y") c{0} c+\nc ::= c b', "'b' has no end"),
        ("foo", "Expected token"),
        ("start: x", "unknown name"),
        ('{"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}', ""),
        ('start: X "b"\nX[stop="q"]: /.*/', ""),
        ('start: x "b"\nx[stop="q"]: /.*/', "rollback"),
        ('start: x "b"\nx[max_tokens=3]: /[a-z]*/', "rollback"),
        ("start: T\nT: /a/ & /b/", ""),
    ],
)
def test_a_malformed_grammar_is_refused(text, rule):
    assert rule in rule_of(Source("grammar", text))


def test_a_vocabulary_that_cannot_begin_the_text_is_refused():
    assert rule_of(Source("choice", '["yes"]'), backend_of("a", "b"))


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


def test_a_matcher_of_someone_else_is_filled_too():
    class Own:
        def fill(self, words):
            words[:] = 5

    masks = np.zeros((2, 9), np.int32)
    assert BACKEND.fill_all([Own(), BACKEND.compile(Source("regex", "a")).matcher((END,))], masks) == [None, None]
    assert masks[0].tolist() == [5] * 9
    assert masks[1].any()


def test_klero_is_imported_without_llguidance():
    code = "import sys, klero, klero.grammar; print('llguidance' in sys.modules, 'xgrammar' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"llguidance is not installed; klero\[engine\] brings it"):
        LLGuidance(BYTES, NUM_BYTES)
