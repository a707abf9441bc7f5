"""JSON schemas as llguidance holds them: what it would drop or read more loosely is refused, or said another way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from klero.grammar.bounds import (
    NUM_DIGITS,
    NUMBERS,
    check_number,
    has_few_digits,
    no_number,
    with_closed_bounds,
)
from klero.grammar.cost import Cost
from klero.grammar.endless import endless_references
from klero.grammar.meeting import Meeting
from klero.grammar.patterns import FORMATS, PATTERNS, held_pattern, with_pattern
from klero.grammar.references import OF_LISTS, OF_NAMES, OF_ONE, References, schemas
from klero.grammar.source import Source

COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
LENGTHS = ("minLength", "maxLength")
TEXTS = ("$schema", "$id", "$anchor", "$ref")
HELD = {
    *OF_NAMES, *OF_LISTS, *OF_ONE, *NUMBERS, *COUNTS, *LENGTHS, *TEXTS,
    "type", "const", "enum", "required", "pattern", "format",
}  # fmt: skip
ANNOTATIONS = {
    "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding", "discriminator", "externalDocs", "xml",
}  # fmt: skip
"""Keywords that forbid nothing. A discriminator only says which property tells the options of a oneOf apart."""

UNSAYABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
MAX_COUNT = 4096
MAX_LENGTH = 32_768


def held_schema(source: Source, schema: Any, cost: Cost | None = None) -> Any:
    """Return a schema that llguidance holds in full and that allows what this one does, or less.

    GrammarError, with the place, for a keyword that it would ignore, for numbers beyond what it can count, and for
    more patterns on one text than it can follow. A part that only endless texts would meet (a required property that
    requires itself) becomes False. cost: that of the schemas before it in the same source.
    """
    _Schema(source, References(None)).held(schema, "$")  # the shape, which the others rely on
    references = References(schema)
    walk = _Schema(source, references)
    walk.check_whole(schema, Cost() if cost is None else cost)
    walk.endless = endless_references(schema, references)
    return walk.held(schema, "$")


class _Schema:
    def __init__(self, source: Source, references: References) -> None:
        self._source, self._references = source, references
        self.endless: set[str] = set()

    def check_whole(self, root: Any, cost: Cost) -> None:
        """Raise for what can only be seen in the document as a whole: the cost of what it says together."""
        for ref in (schema["$ref"] for schema in schemas(root) if "$ref" in schema):
            if self._references.names_a_value(ref):
                self._refuse("$", f"the reference {ref!r:.40} names a value, not a schema; put the schema in $defs")
        self._ask("$", lambda: cost.add(root))
        self._ask("$", Meeting(root, self._references).check)

    def held(self, schema: Any, at: str) -> Any:
        """Return what is held of the schema at a place."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(at, "a schema is an object, true or false")
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
                continue
            if key == "uniqueItems" and value is False:
                continue
            if key not in HELD:
                self._refuse(at, f"{key!r:.40} is not a keyword that can be held; leave it out or say it otherwise")
            made[key] = self._value(key, value, f"{at}.{key}")
        if made.get("$ref") in self.endless:
            return False
        self._check_properties(made, at)
        if "oneOf" in made and "anyOf" not in made and self._told_apart(schema["oneOf"]):
            made["anyOf"] = made.pop("oneOf")
        if no_number(made):
            return False
        return with_pattern(made if made.get("type") == "integer" else with_closed_bounds(made))

    def _value(self, key: str, value: Any, at: str) -> Any:
        if key in OF_NAMES:
            if not isinstance(value, dict):
                self._refuse(at, "must be an object of schemas")
            name = self._pattern if key == "patternProperties" else lambda name, at: name
            found = {name(k, at): self.held(v, f"{at}.{k}") for k, v in value.items()}
            if len(found) < len(value):
                self._refuse(at, "two of its patterns mean the same; make one of them")
            return found
        if key in OF_LISTS:
            if not isinstance(value, list):
                self._refuse(at, "must be a list of schemas")
            return [self.held(item, f"{at}[{i}]") for i, item in enumerate(value)]
        if key in OF_ONE:
            return self.held(value, at)
        if key in ("const", "enum"):
            self._check_values(value, at)
        else:
            self._check_value(key, value, at)
        return self._pattern(value, at) if key == "pattern" else value

    def _check_value(self, key: str, value: Any, at: str) -> None:
        if key in TEXTS:
            if not isinstance(value, str):
                self._refuse(at, f"must be text, and is {value!r:.40}")
        elif key == "type":
            if not isinstance(value, str) and not _are_different_texts(value or None):
                self._refuse(at, f"must be the name of a type, or a list of different ones, and is {value!r:.40}")
        elif key == "required":
            if not _are_different_texts(value):
                self._refuse(at, "must be a list of names, none of them twice")
        elif key in COUNTS + LENGTHS:
            most = MAX_COUNT if key in COUNTS else MAX_LENGTH
            if type(value) is not int or not 0 <= value <= most:
                self._refuse(at, f"must be an integer between 0 and {most}, and is {value!r:.40}")
        elif key in NUMBERS:
            self._check_values(value, at, digits=False)
            self._ask(at, lambda: check_number(key, value))
        elif key == "format" and (not isinstance(value, str) or value not in FORMATS | {*PATTERNS}):
            known = ", ".join(sorted(FORMATS | {*PATTERNS}))
            self._refuse(at, f"the format {value!r:.40} is not known; known are {known}")

    def _check_values(self, value: Any, at: str, digits: bool = True) -> None:
        """Raise for values that cannot be told apart from others, or not be written. digits: of fractions too."""
        if at.endswith(".enum") and not isinstance(value, list):
            self._refuse(at, "must be a list of values")
        for plain in _plain(value):
            if isinstance(plain, int) and abs(plain) > 2**53:
                self._refuse(at, f"{plain!r:.40} is beyond the integers that can be told apart, 2**53")
            if digits and isinstance(plain, float) and not has_few_digits(plain):
                self._refuse(at, f"{plain!r:.40} has more than {NUM_DIGITS} digits, which cannot be told apart")
            if isinstance(plain, str) and UNSAYABLE.search(plain):
                self._refuse(at, f"{plain!r:.40} has a control character, which JSON says by its number only")

    def _pattern(self, value: Any, at: str) -> str:
        return str(self._ask(at, lambda: held_pattern(value)))

    def _check_properties(self, schema: dict[str, Any], at: str) -> None:
        """Names that are not listed may come twice, and are counted each time."""
        least, required = schema.get("minProperties", 0), schema.get("required", [])
        if least > max(1, len(required)):
            self._refuse(f"{at}.minProperties", "can be held up to 1, or up to the number of required properties")

    def _told_apart(self, options: list[Any]) -> bool:
        """Whether a property that all options require has a value of its own in each, so that no value meets two."""
        values = [self._required_values(option) for option in options]
        names = set.intersection(*(set(of_option) for of_option in values)) if values else set()
        for name in names:
            found = [value for of_option in values for value in of_option[name]]
            if len(set(found)) == len(found):
                return True
        return False

    def _required_values(self, option: Any) -> dict[str, list[str]]:
        """The texts that each required property of an object may be, of those properties that list them."""
        if isinstance(option, dict) and "$ref" in option:
            option = self._references.target(option["$ref"])
        if not isinstance(option, dict) or option.get("type") != "object":
            return {}
        texts = {}
        for name in option.get("required", []):
            part = option.get("properties", {}).get(name, {})
            values = part.get("enum", [part["const"]] if "const" in part else []) if isinstance(part, dict) else []
            if values and all(isinstance(value, str) for value in values):
                texts[name] = values
        return texts

    def _ask(self, at: str, question: Callable[[], Any]) -> Any:
        """The answer to a question, or the reason why there is none, with the place."""
        try:
            return question()
        except ValueError as error:
            self._refuse(at, str(error))

    def _refuse(self, at: str, rule: str) -> NoReturn:
        raise self._source.refused(f"{at}: {rule}")


def _are_different_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value) and len({*value}) == len(value)


def _plain(value: Any) -> Iterator[Any]:
    """Every value in a JSON value that is neither an object nor a list."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for below in value:
        yield from _plain(below)
