"""Whether a JSON text is valid under a schema, by the package jsonschema, with two of its keywords read as the standard
has them: patterns in the manner of ECMA 262, and multiples of decimal numbers exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

SPACES = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
MEANINGS = {"$": r"\Z", r"\s": f"[{SPACES}]", r"\S": f"[^{SPACES}]", ".": r"[^\n\r\u2028\u2029]"}
"""What ECMA 262 means by what Python reads otherwise; digits and words are ASCII, by the flag."""


def judged(schema: Any, text: str) -> bool | None:
    """Whether a text is JSON and valid; None where the package cannot say (references that it cannot resolve).

    A property that occurs twice has the value that comes last, as most readers have it.
    """
    from jsonschema_specifications import REGISTRY

    try:
        instance = json.loads(text)
    except ValueError:
        return False
    try:
        return bool(_validator()(schema, registry=REGISTRY).is_valid(instance))
    except Exception:  # a reference that leads nowhere, a pattern that Python does not read
        return None


def found(pattern: str, text: str) -> bool:
    """Whether a pattern of ECMA 262 matches somewhere in a text."""
    pieces = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
    return re.search("".join(MEANINGS.get(piece, piece) for piece in pieces), text, re.ASCII) is not None


def _validator() -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    return extend(
        Draft202012Validator,
        {"pattern": _pattern, "patternProperties": _pattern_properties, "multipleOf": _multiple_of},
    )


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not found(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, schemas: dict[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, below in schemas.items():
            for name, value in instance.items():
                if found(pattern, name):
                    yield from validator.descend(value, below, path=name, schema_path=pattern)


def _multiple_of(validator: Any, step: float, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "number") and Fraction(repr(instance)) % Fraction(repr(step)):
        yield ValidationError(f"{instance!r} is not a multiple of {step!r}")
