"""Cases of our own, a few for each keyword: texts that a grammar must take, and texts that it must not.

The suite checks instances; here are texts, for what instances cannot say: a property that comes twice, a name or a
character in another spelling, a number with an exponent, white space.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Own(NamedTuple):
    """A schema, texts that are valid and must be taken, and texts that are not, or are not written this way."""

    keyword: str
    schema: Any
    valid: tuple[str, ...]
    invalid: tuple[str, ...]



def kind(name: str, *kinds: str) -> dict[str, Any]:
    """An object that is of one of these kinds, with an integer of this name: as pydantic writes tagged unions."""
    properties = {"kind": {"enum": list(kinds)}, name: {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": ["kind", name], "additionalProperties": False}


KINDS = {"oneOf": [{"$ref": "#/$defs/A"}, kind("y", "b", "c")], "$defs": {"A": kind("x", "a")}}
A_INT = {"type": "object", "properties": {"a": {"type": "integer"}}}

OWN = [
    Own("true", True, ("1", '"x"', "[]", "{}", "null", '{"a":[1,{"b":null}]}'), ("", "nul", "[1,]", "{1:2}", " 1")),
    Own("type", {"type": "null"}, ("null",), ("0", '""', "false", "nulll")),
    Own("type", {"type": "boolean"}, ("true", "false"), ("True", "1", '"true"')),
    Own("type", {"type": "integer"}, ("0", "-7", "123456789"), ("1.5", "1e3", "+1", "--1", "01", '"1"', "-")),
    Own("type", {"type": "number"}, ("0", "-0.5", "1e3", "2.5E-7"), (".5", "1.", "0x1", "NaN", "Infinity", "1e")),
    Own("type", {"type": ["string", "null"]}, ('"x"', "null"), ("1", "[]")),
    Own("type", {"type": "string"}, ('""', '"é👍"', r'"\n\t\"\\"', '"/"'), ('"', '"\n"', '"\t"', r'"\x"', r'"\u0061"')),
    Own("type", {"type": "array"}, ("[]", "[1]", '[1,"a",[]]'), ("[", "[,]", "{}", "[ ]", "[1, 2]")),
    Own("type", {"type": "object"}, ("{}", '{"":1}', '{"a":{"b":1}}'), ("{", '{"a"}', "[]", '{"a":1,}', '{"a": 1}')),
    Own("enum", {"enum": ["a", 1, None, [1], {"b": 2}]}, ('"a"', "1", "null", "[1]", '{"b":2}'), ("a", '"b"', "2")),
    Own("enum", {"enum": [True, 0]}, ("true", "0"), ("1", "false")),
    Own("const", {"const": {"a": [1, "é"]}}, ('{"a":[1,"é"]}',), ('{"a":[1,"e"]}', '{"a":[1]}', "{}")),
    Own("const", {"const": 1.5}, ("1.5",), ("1", "1.50001", "15")),
    Own("minimum", {"type": "integer", "minimum": -3}, ("-3", "0", "1000"), ("-4", "-10", "-30")),
    Own("minimum", {"type": "number", "minimum": 1.1}, ("1.1", "2", "1.11"), ("1", "1.09", "0", "-2")),
    Own("maximum", {"type": "integer", "maximum": 99}, ("99", "-5", "0"), ("100", "990", "1e2")),
    Own("maximum", {"type": "number", "maximum": 0.5}, ("0.5", "-9", "0.49"), ("0.51", "1", "5")),
    Own("maximum", {"maximum": 5}, ("5", '"long text"', "{}"), ("6", "1e1")),
    Own("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 0}, ("1", "10"), ("0", "-0", "-1")),
    Own("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, ("9", "-10"), ("10", "11")),
    Own("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1}, ("0.5", "-3"), ("1", "1.0", f"0.{'9' * 20}")),
    Own("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, ("0.5", "3"), ("0", "0.0", f"0.{'0' * 400}1")),
    Own("multipleOf", {"type": "integer", "multipleOf": 3}, ("0", "9", "-3", "300"), ("1", "10", "3.0")),
    Own("multipleOf", {"type": "number", "multipleOf": 0.5}, ("0.5", "2", "1.5"), ("0.25", "1.7")),
    Own("minLength", {"type": "string", "minLength": 2}, ('"ab"', '"éé"', r'"\n\""'), ('"a"', '"é"', '"👍"', r'"\n"')),
    Own("maxLength", {"type": "string", "maxLength": 2}, ('""', '"ab"', '"👍👍"', r'"\\\""'), ('"abc"', '"👍👍👍"')),
    Own("pattern", {"type": "string", "pattern": "^a+$"}, ('"a"', '"aaa"'), ('""', '"ab"', '"ba"', r'"a\n"')),
    Own("pattern", {"type": "string", "pattern": "b"}, ('"b"', '"abc"'), ('""', '"ac"')),
    Own("pattern", {"type": "string", "pattern": '^[^"]*$'}, ('"a"', '""'), (r'"\""', r'"a\"b"')),
    Own("pattern", {"type": "string", "pattern": r"^[^\\]$"}, ('"a"',), (r'"\\"', '""')),
    Own("pattern", {"type": "string", "pattern": "^.$"}, ('"a"', '"é"'), (r'"\n"', r'"\r"', '"\u2028"', '""')),
    Own("pattern", {"type": "string", "pattern": r"^\d\w$"}, ('"1_"', '"2b"'), ('"1é"', '"٣b"', '"1-"')),
    Own("pattern", {"type": "string", "pattern": r"^\S$"}, ('"a"', '"é"'), ('" "', r'"\t"', '"\ufeff"', '"\u00a0"')),
    Own("pattern", {"type": "string", "pattern": r"^\p{L}$"}, ('"a"', '"é"', '"家"'), ('"1"', '" "', '"👍"')),
    Own("pattern", {"type": "string", "pattern": r"^\t$"}, (r'"\t"',), ('"\t"', '" "', r'"\n"')),
    Own("pattern", {"type": "string", "pattern": "^a|b$"}, ('"ax"', '"xb"'), ('"xa"', '"bx"')),
    Own("format", {"type": "string", "format": "date"}, ('"2024-02-29"',), ('"2023-02-29"', '"2024-13-01"', '""')),
    Own("format", {"type": "string", "format": "time"}, ('"23:59:59Z"', '"00:00:00.5+01:00"'), ('"24:00:00Z"',)),
    Own("format", {"type": "string", "format": "uuid"}, ('"2eb8aa08-aa98-11ea-b4aa-73b441d16380"',), ('"2eb8aa08"',)),
    Own("format", {"type": "string", "format": "ipv4"}, ('"127.0.0.1"',), ('"256.0.0.1"', '"1.2.3"', '"01.2.3.4"')),
    Own("items", {"type": "array", "items": {"type": "integer"}}, ("[]", "[1,2]"), ('["a"]', '[1,"a"]')),
    Own("items", {"type": "array", "items": False}, ("[]",), ("[1]",)),
    Own("prefixItems", {"type": "array", "prefixItems": [{"const": 1}], "items": False}, ("[1]",), ("[2]", "[1,1]")),
    Own("minItems", {"type": "array", "minItems": 2, "items": {"const": 0}}, ("[0,0]", "[0,0,0]"), ("[]", "[0]")),
    Own("maxItems", {"type": "array", "maxItems": 1}, ("[]", "[1]"), ("[1,2]",)),
    Own("properties", A_INT, ("{}", '{"a":1}', '{"a":1,"b":"x"}', '{"b":"x"}'), ('{"a":"x"}', '{"a":1,"a":"x"}')),
    Own("properties", A_INT, ('{"A":"x"}', '{"aa":"x"}'), (r'{"\u0061":"x"}', r'{"\u0061":1}', '{"b":1,"a":"x"}')),
    Own("required", {"type": "object", "required": ["a"]}, ('{"a":1}', '{"a":null,"b":1}'), ("{}", '{"b":1}')),
    Own("additionalProperties", {**A_INT, "additionalProperties": False}, ('{"a":1}',), ('{"b":1}', '{"a":1,"b":1}')),
    Own(
        "additionalProperties",
        {**A_INT, "additionalProperties": {"type": "string"}},
        ('{"a":1,"b":"x"}', '{"c":"x"}'),
        ('{"b":1}', '{"a":"x"}', '{"a":1,"a":"x"}'),
    ),
    Own(
        "patternProperties",
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        ('{"ab":1}', '{"b":null}'),
        ('{"ab":null}', '{"b":1}', r'{"\u0061":null}'),
    ),
    Own("minProperties", {"type": "object", "minProperties": 1}, ('{"a":1}', '{"a":1,"b":2}'), ("{}",)),
    Own("maxProperties", {"type": "object", "maxProperties": 1}, ("{}", '{"a":1}'), ('{"a":1,"b":2}',)),
    Own("anyOf", {"anyOf": [{"type": "integer"}, {"const": "x"}]}, ("1", '"x"'), ('"y"', "1.5")),
    Own("anyOf", {"anyOf": [{"minLength": 2}, {"maxLength": 0}], "type": "string"}, ('""', '"ab"'), ('"a"', "1")),
    Own("allOf", {"allOf": [{"minimum": 2}, {"maximum": 4}], "type": "integer"}, ("2", "4"), ("1", "5")),
    Own("oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, ("1", '"x"'), ("1.5", "null")),
    Own("oneOf", KINDS, ('{"kind":"a","x":1}', '{"kind":"c","y":2}'), ('{"kind":"a","y":2}', '{"kind":"d"}', "{}")),
    Own("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, ("1",), ('"x"', "null")),
    Own("$ref", {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}}, ("3",), ("4", "1.5")),
    Own(
        "$ref",
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        ("[]", "[[],[[]]]"),
        ("[1]", "[[],[],[]]", "[[]", "[[1]]"),
    ),
    Own("annotations", {"title": "t", "description": "d", "default": 1, "type": "null"}, ("null",), ("1", '"t"')),
]

REFUSED: list[tuple[str, Any]] = [
    ("not", {"not": {"type": "integer"}}),
    ("if", {"if": {"type": "integer"}, "then": {"minimum": 0}}),
    ("contains", {"type": "array", "contains": {"type": "integer"}}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {"dependencies": {"a": ["b"]}}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}),
    ("oneOf", {"oneOf": [kind("x", "a", "b"), kind("x", "b", "c")]}),  # both may be b
    ("$ref", {"$ref": "other.json"}),
    ("$ref", {"$ref": "https://json-schema.org/draft/2020-12/schema"}),
    ("$ref", {"$ref": "#/$defs/nowhere"}),
    ("format", {"type": "string", "format": "no-such-format"}),
    ("pattern", {"type": "string", "pattern": "(?=a)b"}),
    ("pattern", {"type": "string", "pattern": r"(a)\1"}),
    ("pattern", {"type": "string", "pattern": "("}),
    ("pattern", {"type": "string", "pattern": "(?i)a"}),
    ("pattern", {"type": "string", "pattern": r"[\x00-\x1f]"}),
    ("unknown", {"type": "string", "maxlength": 3}),
    ("x-guidance", {"x-guidance": {"lenient": True}, "not": {"type": "integer"}}),
    ("x-guidance", {"properties": {"a": {"x-guidance": {"whitespace_flexible": True}}}}),
]
"""Keywords that cannot be held, or mean something else here: an error, never a looser grammar."""

UNSATISFIABLE: list[Any] = [
    False,
    {"enum": []},
    {"type": "strnig"},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]},
    {"type": "object", "additionalProperties": False, "required": ["a"]},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "string", "pattern": "^a$", "maxLength": 0},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "array", "minItems": 3, "maxItems": 2},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"const": 1, "type": "string"},
    {"const": {"a": 1}, "required": ["b"]},
    {"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 10},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"anyOf": [False, {"enum": []}]},
]
"""Schemas that nothing meets."""

SETS = [
    '[^"]', r"[^\\]", r'[^"\\]', '[^"a]', r"[^\n]", r'[^\n"]', r"[^\t ]", "[^a]", r"[^\x00-\x1f]", "[^A-Za-z]", "[^/]",
    "[ -~]", "[#-~]", "[!-#]", "[ -!]", r"[\]-~]", r"[\s\S]", r"[^\s]", r"[^\d]", r"[^\w]", r"[\d_]", r"[\x00-\x1f]",
    r"[\t\n]", r"[\n]", r"[\t-!]", r"\s", r"\S", r"\d", r"\D", r"\w", r"\W", ".", r"\.", r"\/", r"\x22", r"\t",
    r'(?:[^"]|x)', r"[^\x22]", r"[^nrtbfu]", "[é-ü]", "[^é]", "[👍-👎]", "[^👍]",
]  # fmt: skip
"""Sets of characters, for patterns: a text of one character is taken only if it is in the set."""
