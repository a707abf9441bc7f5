"""Twenty schemas of growing nastiness. Each has answers without end or a long one, and at least one short one."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {"type": "string", "maxLength": 12}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """An object with these properties and no others; all are required unless told."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False} | more


def nested(depth: int) -> dict[str, Any]:
    """Objects in arrays in objects, `depth` of them."""
    schema: dict[str, Any] = {"type": "boolean"}
    for level in range(depth):
        if level % 2:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
        schema = closed({f"d{level}": schema})
    return schema


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": closed(
            {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3}},
            required=["name"],
        )
    },
}

LISTS = {
    "$defs": {
        "odd": closed({"head": {"type": "integer"}, "tail": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/even"}]}}),
        "even": closed({"head": {"type": "boolean"}, "tail": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/odd"}]}}),
    },
    "$ref": "#/$defs/odd",
}

SCHEMAS: dict[str, Any] = {
    "empty object": closed({}),
    "flat": closed({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "any value of a few types": {"type": ["boolean", "null", "integer", "string"], "maxLength": 20},
    "enum of all types": {"enum": [1, "1", 1.5, None, True, [1, "1"], {"a": 1}, "", "a\"b\\c\n", "ü", "👍"]},
    "const": {"const": {"b": [1, {"a": None}], "a": "é\t"}},
    "integers between": closed(
        {
            "small": {"type": "integer", "minimum": -5, "maximum": 5},
            "open": {"type": "integer", "exclusiveMinimum": 98, "exclusiveMaximum": 1002},
            "even": {"type": "integer", "multipleOf": 2, "minimum": 0},
            "low": {"type": "integer", "maximum": -17},
        }
    ),
    "numbers between": closed(
        {
            "share": {"type": "number", "minimum": 0, "maximum": 1},
            "open": {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 2.25},
            "at least": {"type": "number", "minimum": 1.1},
        }
    ),
    "arrays with limits": closed(
        {
            "none": {"type": "array", "maxItems": 0},
            "three": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
            "some": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 5},
            "matrix": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
                "maxItems": 2,
            },
        }
    ),
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, TEXT, {"enum": ["N", "S"]}],
        "items": False,
        "minItems": 2,
    },
    "lengths and patterns": closed(
        {
            "plate": {"type": "string", "pattern": "^[A-Z]{1,3}-[0-9]{2,4}$"},
            "two": {"type": "string", "minLength": 2, "maxLength": 2},
            "version": {"type": "string", "pattern": r"^v(0|[1-9]\d*)\.(0|[1-9]\d*)(-(alpha|beta))?$"},
            "greek": {"type": "string", "pattern": "^[α-ω]{1,6}$"},
        }
    ),
    "names of all alphabets": closed(
        {
            "größe": {"type": "integer"},
            "名前": TEXT,
            "имя с пробелом": {"type": "boolean"},
            "👩‍👩‍👧": {"const": "семья"},
            'quote"back\\slash': {"type": "null"},
            "": {"enum": ["", " "]},
            "line\nbreak\t": {"type": "boolean"},
        }
    ),
    "references": {
        "type": "object",
        "properties": {
            "from": {"$ref": "#/$defs/place"},
            "to": {"$ref": "#/$defs/place"},
            "odd/name~": {"$ref": "#/$defs/a~1b~0c"},
        },
        "required": ["from", "to", "odd/name~"],
        "additionalProperties": False,
        "$defs": {
            "place": closed({"x": {"$ref": "#/$defs/coordinate"}, "y": {"$ref": "#/$defs/coordinate"}}),
            "coordinate": {"type": "integer", "minimum": -180, "maximum": 180},
            "a/b~c": {"enum": ["slash", "tilde"]},
        },
    },
    "tree": TREE,
    "lists that call each other": LISTS,
    "one of several objects": {
        "anyOf": [
            closed({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
            closed({"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1}}),
            closed({"kind": {"const": "polygon"}, "points": {"type": "array", "items": {"type": "integer"}}}),
        ]
    },
    "optional and additional": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string", "maxLength": 5},
            "c": {"type": "boolean"},
            "d": {"type": "null"},
            "constructor": {"type": "integer"},
        },
        "required": ["b", "d"],
        "additionalProperties": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "formats": closed(
        {
            "day": {"type": "string", "format": "date"},
            "hour": {"type": "string", "format": "time"},
            "moment": {"type": "string", "format": "date-time"},
            "id": {"type": "string", "format": "uuid"},
            "host": {"type": "string", "format": "ipv4"},
        }
    ),
    "long enum": {"enum": [f"item-{number:03d}-{'ab'[number % 2] * (number % 7)}" for number in range(500)]},
    "deep": nested(25),
    "all of it": closed(
        {
            "action": {"enum": ["create", "update", "delete", "löschen"]},
            "target": {"$ref": "#/$defs/target"},
            "arguments": {"type": "object", "additionalProperties": {"type": ["string", "number"], "maxLength": 8}},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 4},
            "retries": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"const": "for ever"}]},
            "when": {"type": ["string", "null"], "format": "date-time"},
            "then": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        },
        required=["action", "target", "retries"],
    )
    | {
        "$defs": {
            "target": {
                "anyOf": [
                    closed({"path": {"type": "string", "pattern": "^(/[a-z0-9_]+){1,4}$"}}),
                    closed({"id": {"type": "integer", "minimum": 1}, "shard": {"enum": [0, 1, 2, 3]}}),
                ]
            }
        }
    },
}
