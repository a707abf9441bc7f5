"""JSON schemas as llguidance holds them: what is refused, what is said another way, and white space."""

from __future__ import annotations

import time

import pytest
from tests.grammar.bytewise import LOOP, follow, rule_of, schema

from klero.grammar import Source
from klero.grammar.endless import endless_references
from klero.grammar.references import References


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
        ({"enum": [0.12345678901234566]}, "$.enum: 0.12345678901234566 has more than 15 digits"),
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
        ({"required": ["a", "a"]}, "$.required: must be a list of names, none of them twice"),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"required": 5, "type": "object"}}},
            "$.$defs.x.required: must be a list",
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": [1], "type": "object"}}}, "$.$defs.x.properties: must be"),
        ({"$ref": []}, "$.$ref: must be text, and is []"),
        ({"$id": 5}, "$.$id: must be text, and is 5"),
        ({"format": []}, "$.format: the format [] is not known"),
        ({"type": 5}, "$.type: must be the name of a type"),
        ({"type": ["array", "array"]}, "$.type: must be the name of a type, or a list of different ones"),
        ({"enum": 5}, "$.enum: must be a list of values"),
        ({"type": "number", "minimum": "5"}, "$.minimum: must be a number, and is '5'"),
        ({"type": "number", "maximum": None}, "$.maximum: must be a number, and is None"),
        ({"type": "number", "exclusiveMaximum": True}, "$.exclusiveMaximum: must be a number, and is True"),
        ({"maximum": [0]}, "$.maximum: must be a number, and is [0]"),
        ({"type": "number", "multipleOf": 0}, "$.multipleOf: must be above 0"),
        ({"$ref": "#/const/a", "const": {"a": {"minimum": 1}}}, "'#/const/a' names a value, not a schema"),
        ({"$ref": "h://e#/enum/0", "$id": "h://e", "enum": [{"minimum": 1}]}, "names a value, not a schema"),
        ({"patternProperties": {r"\<": {}, "<": False}}, "two of its patterns mean the same"),
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
        ({"type": "number", "exclusiveMaximum": 1}, "0.999999999999999", 16),
        ({"type": "number", "exclusiveMaximum": 1}, "0.99999999999999", "end"),
        ({"type": "number", "maximum": 0.9999999999999999}, "1", 0),
        ({"type": "number", "exclusiveMinimum": 0}, "0.00000000000001", "end"),
        ({"type": "number", "exclusiveMinimum": 0}, "0.000000000000009", 15),
        ({"type": "number", "exclusiveMinimum": 0, "minimum": 2}, "1", "more"),
        ({"type": "number", "minimum": -2.5, "exclusiveMaximum": 1e6}, "999999.99999999", "end"),
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


def kind(value):
    return {"type": "object", "properties": {"k": {"const": value}}, "required": ["k"], "additionalProperties": False}


@pytest.mark.parametrize("ref", ["http://e/inner", "#/$defs/inner"])
def test_options_below_an_inner_id_are_not_told_apart_by_those_of_the_root(ref):
    inner = {"$id": "http://e/inner", "$defs": {"a": kind("x"), "b": kind("x")}}
    inner["oneOf"] = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    asked = {"$id": "http://e/root", "$ref": ref, "$defs": {"a": kind("x"), "b": kind("y"), "inner": inner}}
    assert "oneOf constraints are not supported" in rule_of(schema(asked))  # both of inner's own options may be x


@pytest.mark.parametrize("key", ["allOf", "anyOf"])
def test_parts_without_end_are_found_in_time_linear_in_the_schema(key):
    """Each part requires the next one twice over; the last is met, or requires the first."""
    refs = [f"#/$defs/{i}" for i in range(3001)]
    parts = {
        str(i): {"type": "object", "required": ["a"], "properties": {"a": {key: [{"$ref": refs[i + 1]}] * 2}}}
        for i in range(3000)
    }
    for last, endless in (({"type": "null"}, set()), ({"type": ["array", "object"], "$ref": refs[0]}, set(refs))):
        root = {"$ref": refs[0], "$defs": dict(reversed(parts.items())) | {"3000": last}}
        start = time.perf_counter()
        assert endless_references(root, References(root)) == endless
        assert time.perf_counter() - start < 3


def test_a_reference_into_a_circle_is_met_where_one_way_leads_out():
    ways = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}
    root = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["x"], "properties": {"x": ways}}}}
    assert endless_references(root, References(root)) == set()
    ways["anyOf"][1]["minItems"] = 1
    assert endless_references(root, References(root)) == {"#/$defs/a"}
