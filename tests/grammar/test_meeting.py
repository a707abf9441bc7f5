"""What meets on one value of a schema, by eye."""

from __future__ import annotations

import pytest

from klero.grammar.meeting import Meeting
from klero.grammar.references import References


def meets(schema):
    """None, or what is said of it."""
    try:
        Meeting(schema, References(schema)).check()
    except ValueError as error:
        return str(error)
    return None


P = [{"pattern": f"^{letter}"} for letter in "abcd"]
A = {"type": "object", "properties": {"a": P[0], "b": P[0]}}
B = {"type": "object", "properties": {"a": P[1], "c": P[1]}}
C = {"type": "object", "properties": {"a": P[2], "d": P[2]}}
ANY = {"additionalProperties": P[2]}
FITTING = {"patternProperties": {"^a": P[2]}}


@pytest.mark.parametrize(
    "schema, number",
    [
        ({"allOf": P[:2]}, None),
        ({"allOf": P[:3]}, 3),
        ({"allOf": [P[0], P[0], P[1]]}, None),  # one of them twice
        ({"allOf": P[:2], "pattern": "x"}, 3),
        ({"allOf": P[:2], "maxLength": 3}, 3),
        ({"pattern": "x", "maxLength": 3, "minLength": 1}, None),
        ({"pattern": "x", "maxLength": 3, "format": "email"}, 3),
        ({"allOf": [{"allOf": P[:2]}, {"allOf": [P[2]]}]}, 3),
        ({"anyOf": P}, None),
        ({"anyOf": P, "pattern": "x"}, None),
        ({"anyOf": P, "allOf": P[:2]}, 3),
        ({"anyOf": P, "oneOf": P[2:], "pattern": "x"}, 3),
        ({"$ref": "#/$defs/a", "pattern": "x", "maxLength": 1, "$defs": {"a": P[0]}}, 3),
        ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": P[0]}}, None),
        ({"allOf": [{"$ref": "#p"}, *P[:2]], "$defs": {"a": {"$anchor": "p", **P[2]}}}, 3),
        ({"$id": "h://e", "allOf": [{"$ref": "h://e#/$defs/a"}, P[0]], "$defs": {"a": P[0]}}, 3),  # not followed
        ({"$id": "h://e", "allOf": [{"$ref": "h://e#/$defs/a"}, {}], "$defs": {"a": P[0]}}, None),
        ({"allOf": [A, B]}, None),
        ({"allOf": [A, B, C]}, 3),
        ({"allOf": [A, {"properties": {"b": P[1]}}, {"properties": {"c": P[2]}}]}, None),
        ({"allOf": [A, {"properties": {"b": P[1]}, **ANY}]}, None),
        ({"allOf": [A, B, ANY]}, 3),
        ({"allOf": [A, B, FITTING]}, 3),
        ({"allOf": [{"items": P[0]}, {"items": P[1]}, {"prefixItems": [{}, P[2]]}]}, 3),
        ({"allOf": [{"items": P[0]}, {"prefixItems": [{}, P[2]], "items": P[1]}]}, None),
        ({"properties": {"a": {"allOf": P[:3]}}}, 3),
        ({"type": "object", "properties": {"next": {"$ref": "#"}, "a": P[0]}, "allOf": [B, {"$ref": "#"}]}, None),
        ({"properties": {"a": {"allOf": P[:2]}}, "patternProperties": {"a": P[2]}}, 3),
        ({"allOf": [{"items": True, "maxLength": 2}, {"items": False}, {"prefixItems": [True]}]}, None),
    ],
)
def test_at_most_two_of_patterns_formats_and_lengths_hold_on_one_text(schema, number):
    found = meets(schema)
    assert found is None if number is None else found.startswith(f"{number} of pattern, format and length hold")


@pytest.mark.parametrize(
    "steps, is_followed", [([2, 3, 5], True), ([0.01, 0.5], True), ([101, 103], True), ([101, 103, 2], False)]
)
def test_multiples_hold_together_up_to_their_product(steps, is_followed):
    found = meets({"allOf": [{"multipleOf": step} for step in steps]})
    assert found is None if is_followed else "may be 20000 at most, multiplied" in found


def test_many_patterns_of_names_cannot_be_told_apart():
    for number, is_followed in ((16, True), (17, False)):
        for names in ([list(range(number))], [[i] for i in range(number)]):
            found = meets({"allOf": [{"patternProperties": {f"^{i}$": {} for i in part}} for part in names]})
            assert (found is None) == is_followed


def test_the_work_is_bounded():
    """4 to the 20 ways to choose."""
    asked = {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"maxLength": j}}} for j in range(4)]} for i in range(20)]}
    assert "too many parts of it hold together" in meets(asked)


def test_many_places_that_refer_to_one_union_are_no_work():
    union = {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string", **P[0]}}} for i in range(100)]}
    places = {f"q{i}": {"$ref": "#/$defs/u"} for i in range(3000)}
    assert meets({"properties": places, "$defs": {"u": union}}) is None
