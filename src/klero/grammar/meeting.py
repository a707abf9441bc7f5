"""What meets on one value of a schema: patterns, lengths and multiples, whose intersection is what costs most.

llguidance has no bound on the work of telling whether a text meets several patterns at once. So the parts that hold
on one value are found here, through references and allOf, and where several objects or arrays say the same item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from klero.grammar.bounds import MAX_MULTIPLE, num_remainders
from klero.grammar.references import References, schemas

MAX_STRINGS = 2
MAX_NAMES = 16
MAX_WORK = 200_000

TEXTS = ("pattern", "format", "minLength", "maxLength")
NEUTRAL = ("$defs", "definitions", "$schema", "$id", "$anchor", "type")

Part = dict[str, Any]


class Meeting:
    """A check of the schemas of a document, whose shape is checked before."""

    def __init__(self, root: Any, references: References) -> None:
        self._references = references
        self._schemas = list(schemas(root))
        self._has_texts = any(key in schema for schema in self._schemas for key in TEXTS)
        self._work = 0

    def check(self) -> None:
        """Raise ValueError where more meets on one value than can be followed.

        That is two of patterns, formats and lengths on a text (both lengths are one), multiples of 20,000 in all on a
        number, and 16 patternProperties on an object. A reference that is not followed counts as two on a text.
        """
        if not any(key in schema for schema in self._schemas for key in (*TEXTS, "multipleOf", "patternProperties")):
            return
        left: list[Sequence[Part]] = [(schema,) for schema in self._schemas if not _is_one_of_others(schema)]
        seen: set[frozenset[int]] = set()
        while left:
            for parts in self._cases(left.pop()):
                self._check(parts)
                if len(parts) > 1 or {"properties", "patternProperties"} <= parts[0].keys():
                    for found in _below(parts):
                        below = [schema for schema in found if isinstance(schema, dict)]
                        self._count(len(below))
                        key = frozenset(map(id, below))
                        if len(key) > 1 and key not in seen:
                            seen.add(key)
                            left.append(below)

    def _cases(self, state: Sequence[Part]) -> Iterator[list[Part]]:
        """The parts that hold together with these: what they refer to, and of each anyOf and oneOf one option."""
        left: list[tuple[list[Any], dict[int, Part], list[list[Any]]]] = [(list(state), {}, [])]
        while left:
            pending, parts, choices = left.pop()
            while pending:
                self._count(1)
                schema = pending.pop()
                if not isinstance(schema, dict) or id(schema) in parts:
                    continue
                parts[id(schema)] = schema
                pending.extend(schema.get("allOf", []))
                if "$ref" in schema:
                    pending.append(self._references.target(schema["$ref"]))
                choices.extend(schema[key] for key in ("anyOf", "oneOf") if key in schema)
            if choices:
                options = choices.pop()
                self._count(len(options) * (1 + len(parts)))
                left.extend(([option], dict(parts), list(choices)) for option in options)
            else:
                yield list(parts.values())

    def _check(self, parts: list[Part]) -> None:
        """Raise ValueError for parts that hold on one value and cannot be followed together."""
        texts = {(key, part[key]) for part in parts for key in ("pattern", "format") if key in part}
        num_texts = len(texts) + any("minLength" in part or "maxLength" in part for part in parts)
        if self._has_texts:
            unknown = [part for part in parts if "$ref" in part and self._references.target(part["$ref"]) is None]
            num_texts += MAX_STRINGS * len(unknown)
        if num_texts > MAX_STRINGS:
            shown = ", ".join(sorted({value for key, value in texts}))
            raise ValueError(
                f"{num_texts} of pattern, format and length hold on one text, and {MAX_STRINGS} can be followed "
                f"together; say them by one pattern ({shown:.80})"
            )
        product = 1
        for step in {part["multipleOf"] for part in parts if "multipleOf" in part}:
            product *= num_remainders(step)
        if product > MAX_MULTIPLE:
            raise ValueError(f"every multipleOf of one number: its digits may be {MAX_MULTIPLE} at most, multiplied")
        if len({name for part in parts for name in part.get("patternProperties", {})}) > MAX_NAMES:
            raise ValueError(f"at most {MAX_NAMES} patternProperties can be told apart in one object; list the names")

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise ValueError("too many parts of it hold together, through allOf and references, to be followed")


def _is_one_of_others(schema: Part) -> bool:
    """Whether a schema says nothing but which others may hold, each of which is checked by itself."""
    others = [schema[key] for key in ("$ref", "anyOf", "oneOf") if key in schema] + schema.get("allOf", [])
    return len(others) == 1 and schema.keys() <= {"$ref", "anyOf", "oneOf", "allOf", *NEUTRAL}


def _below(parts: list[Part]) -> Iterator[list[Any]]:
    """The schemas that hold together on one property or one item of a value that all these parts hold on."""
    names = {name for part in parts for name in part.get("properties", {})}
    fitting = [list(part.get("patternProperties", {}).values()) for part in parts]
    several = sum(map(bool, fitting)) > 1  # names that match a pattern in one part and another in the next
    listed = [_property(parts, name) for name in names] + [_property(parts, None)]
    for below in listed:
        if several:
            yield [*below, *(schema for of_part in fitting for schema in of_part)]
        else:
            yield below
            yield from ([*below, schema] for of_part in fitting for schema in of_part)
    longest = max(len(part.get("prefixItems", [])) for part in parts)
    for index in range(longest + 1):
        yield [_item(part, index) for part in parts]


def _property(parts: list[Part], name: str | None) -> list[Any]:
    found = [part.get("properties", {}).get(name, part.get("additionalProperties")) for part in parts]
    return [schema for schema in found if isinstance(schema, dict)]


def _item(part: Part, index: int) -> Any:
    first = part.get("prefixItems", [])
    return first[index] if index < len(first) else part.get("items")
