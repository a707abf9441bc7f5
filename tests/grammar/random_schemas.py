"""Schemas drawn at random from the keywords that can be held, many of them combined in ways that nobody would write."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "b", "ab", "ba", "é", 'q"', "x-y"]
PATTERNS = ["^a", "b$", "^[a-z]{1,3}$", "^a|b", "é", "[0-9]+", "^(ab)*$", "^.$", "^[^a]$"]
PATTERNS += [r"^\w+$", r"^\S*$", r"\D", '^[^"]*$', r"^[^\\]+$", r"^\s?$", "^[^\n]$", "^(é|👍){2}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration"]
CONSTANTS = [0, 1, -2, 1.5, 0.1, True, False, None, "", "a", "ab", 'q"', "é\n"]
CONSTANTS += [[], [1, "a"], {}, {"a": 1}, {"b": {"a": []}}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def random_schema(chance: random.Random, depth: int = 3) -> Any:
    """A schema, most often one that something meets."""
    schema: Any = {"$defs": {name: _schema(chance, depth - 1) for name in ("d", "e")}, **_object(chance, depth)}
    return schema


def _schema(chance: random.Random, depth: int) -> Any:
    roll = chance.random()
    if roll < 0.04:
        return chance.random() < 0.7
    if roll < 0.12:
        return {"$ref": chance.choice(["#/$defs/d", "#/$defs/e"])}
    return _object(chance, depth)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    makers = [_scalar, _scalar, _string, _number] + ([_array, _properties, _properties, _combined] if depth > 0 else [])
    schema: dict[str, Any] = {}
    for maker in chance.sample(makers, k=chance.choice([1, 1, 1, 2])):
        schema |= maker(chance, depth)
    return schema


def _scalar(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.randrange(4)
    if kind == 0:
        return {"enum": chance.sample(CONSTANTS, k=chance.randint(1, 6))}
    if kind == 1:
        return {"const": chance.choice(CONSTANTS)}
    if kind == 2:
        return {"type": chance.sample(TYPES, k=chance.randint(1, 3))}
    return {"type": chance.choice(TYPES)}


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"} if chance.random() < 0.8 else {}
    for key, value in (
        ("minLength", chance.randint(0, 3)),
        ("maxLength", chance.randint(2, 5)),
        ("pattern", chance.choice(PATTERNS)),
        ("format", chance.choice(FORMATS)),
    ):
        if chance.random() < 0.35:
            schema[key] = value
    return schema


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": chance.choice(["integer", "number"])} if chance.random() < 0.8 else {}
    for key, value in (
        ("minimum", chance.choice([-10, -1.5, 0, 0.25, 7])),
        ("maximum", chance.choice([-1, 0, 2.5, 10, 99])),
        ("exclusiveMinimum", chance.choice([-3, 0, 1])),
        ("exclusiveMaximum", chance.choice([0, 4, 1000.5])),
        ("multipleOf", chance.choice([2, 3, 0.5, 0.1, 10])),
    ):
        if chance.random() < 0.3:
            schema[key] = value
    return schema


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"} if chance.random() < 0.8 else {}
    if chance.random() < 0.4:
        schema["prefixItems"] = [_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.7:
        schema["items"] = _schema(chance, depth - 1)
    if chance.random() < 0.4:
        schema["minItems"] = chance.randint(0, 3)
    if chance.random() < 0.4:
        schema["maxItems"] = chance.randint(1, 4)
    return schema


def _properties(chance: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if chance.random() < 0.8 else {}
    if chance.random() < 0.8:
        names = chance.sample(NAMES, k=chance.randint(1, 4))
        schema["properties"] = {name: _schema(chance, depth - 1) for name in names}
    if chance.random() < 0.4:
        schema["required"] = chance.sample(NAMES, k=chance.randint(1, 2))
    if chance.random() < 0.3:
        schema["patternProperties"] = {chance.choice(PATTERNS): _schema(chance, depth - 1)}
    if chance.random() < 0.6:
        schema["additionalProperties"] = chance.choice([False, True, _schema(chance, depth - 1)])
    if chance.random() < 0.2:
        schema["minProperties"] = chance.randint(0, 2)
    if chance.random() < 0.2:
        schema["maxProperties"] = chance.randint(0, 3)
    return schema


def _combined(chance: random.Random, depth: int) -> dict[str, Any]:
    key = chance.choice(["anyOf", "allOf", "oneOf"])
    return {key: [_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]}
