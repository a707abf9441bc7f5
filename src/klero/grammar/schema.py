"""JSON schemas as llguidance holds them: what it would drop or read more loosely is refused, or said another way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any, NoReturn
from urllib.parse import unquote

from klero.errors import Fault, GrammarError
from klero.grammar.source import Source

OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
OF_ONE = ("items", "additionalProperties", "additionalItems")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
LENGTHS = ("minLength", "maxLength")
HELD = {
    *OF_NAMES, *OF_LISTS, *OF_ONE, *NUMBERS, *COUNTS, *LENGTHS,
    "$schema", "$id", "$anchor", "$ref", "type", "const", "enum", "required", "pattern", "format",
}  # fmt: skip
ANNOTATIONS = {
    "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding", "discriminator", "externalDocs", "xml",
}  # fmt: skip
"""Keywords that forbid nothing. A discriminator only says which property tells the options of a oneOf apart."""

UNSAYABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

PIECE = re.compile(r"\\[pP]\{[^}]*\}|\\[xu]\{[^}]*\}|\\x..|\\u....|\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""What a pattern is made of: escapes, sets, and single characters."""
CATEGORY = re.compile(r"\\[pP](?:[LMNPSZ]|\{[LMNPSZ][a-z]?\})")
SPACES = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
OTHER_SPACES = r"\x1c-\x1f\x85\ufeff"
"""What \\s means to ECMA 262 and to everyone else, and what it means to some."""

MAX_COUNT = 4096
MAX_LENGTH = 32_768
MAX_MULTIPLE = 20_000
MAX_PASSES = 64
NUM_DIGITS = 15

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
HOURS = "(?:[01][0-9]|2[0-3])"
TIME = rf"{HOURS}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{HOURS}:[0-5][0-9])"
PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$"}
"""Formats that llguidance reads too loosely: 29 February of every year, the year 0, a 61st second at any time."""
FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}


def held_schema(source: Source, schema: Any) -> Any:
    """Return a schema that llguidance holds in full and that allows what this one does, or less.

    GrammarError, with the place, for a keyword that it would ignore, and for numbers beyond what it can count. A part
    that only endless texts would meet (a required property that requires itself) becomes False.
    """
    return _Schema(source, schema).held(schema, "$")


class _Schema:
    def __init__(self, source: Source, root: Any) -> None:
        self._source, self._root = source, root
        self._endless = set(_endless(root))

    def held(self, schema: Any, at: str) -> Any:
        """Return what is held of the schema at a place."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(at, "a schema is an object, true or false")
        if schema.get("$ref") in self._endless:
            return False
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
                continue
            if key == "uniqueItems" and value is False:
                continue
            if key not in HELD:
                self._refuse(at, f"{key!r:.40} is not a keyword that can be held; leave it out or say it otherwise")
            made[key] = self._value(key, value, f"{at}.{key}")
        self._check_properties(made, at)
        if "oneOf" in made and "anyOf" not in made and self._told_apart(schema["oneOf"]):
            made["anyOf"] = made.pop("oneOf")
        if _no_number(made):
            return False
        return _with_pattern(made if made.get("type") == "integer" else _with_closed_bounds(made))

    def _value(self, key: str, value: Any, at: str) -> Any:
        if key in OF_NAMES:
            if not isinstance(value, dict):
                self._refuse(at, "must be an object of schemas")
            name = self._pattern if key == "patternProperties" else lambda name, at: name
            return {name(k, at): self.held(v, f"{at}.{k}") for k, v in value.items()}
        if key in OF_LISTS:
            if not isinstance(value, list):
                self._refuse(at, "must be a list of schemas")
            return [self.held(item, f"{at}[{i}]") for i, item in enumerate(value)]
        if key in OF_ONE:
            return self.held(value, at)
        self._check_value(key, value, at)
        return self._pattern(value, at) if key == "pattern" else value

    def _check_value(self, key: str, value: Any, at: str) -> None:
        if key == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                self._refuse(at, "must be a list of names")
        elif key in COUNTS + LENGTHS:
            most = MAX_COUNT if key in COUNTS else MAX_LENGTH
            if type(value) is not int or not 0 <= value <= most:
                self._refuse(at, f"must be an integer between 0 and {most}, and is {value!r:.40}")
        elif key in ("const", "enum", *NUMBERS):
            for plain in _plain(value):
                if isinstance(plain, int) and abs(plain) > 2**53:
                    self._refuse(at, f"{plain!r:.40} is beyond the integers that can be told apart, 2**53")
                if (
                    isinstance(plain, float)
                    and _rounded(plain, ROUND_FLOOR, False) != plain
                    and key in ("const", "enum")
                ):
                    self._refuse(at, f"{plain!r:.40} has more than {NUM_DIGITS} digits, which cannot be told apart")
                if key == "multipleOf" and _num_remainders(plain) > MAX_MULTIPLE:
                    self._refuse(
                        at, f"its digits may be {MAX_MULTIPLE} at most, apart from zeros and the decimal point"
                    )
                if isinstance(plain, str) and UNSAYABLE.search(plain):
                    self._refuse(at, f"{plain!r:.40} has a control character, which JSON says by its number only")
        elif key == "format" and value not in FORMATS and value not in PATTERNS:
            known = ", ".join(sorted(FORMATS | {*PATTERNS}))
            self._refuse(at, f"the format {value!r:.40} is not known; known are {known}")

    def _pattern(self, value: Any, at: str) -> str:
        """A pattern of ECMA 262 in the words of Rust's regex."""
        if not isinstance(value, str):
            self._refuse(at, "must be a regular expression")
        pieces = PIECE.findall(value)
        for piece in pieces:
            inside = piece[1:-1] if piece.startswith("[") else piece
            if piece.startswith("[") and re.search(r"\[|&&|--|~~", re.sub(r"\\.", "", inside)):
                self._refuse(at, f"the set {piece!r:.40} has more than one meaning; escape '[', '&', '-' and '~' in it")
            if any(not CATEGORY.fullmatch(name) for name in re.findall(r"\\[pP](?:\{[^}]*\}|.)", inside)):
                self._refuse(at, f"{piece!r:.40} can be held for the categories L, M, N, P, S and Z only")
            if re.search(r"\x00|\\(?:0|x0|u00[01]|c|[xu]\{0*[01]?.?\})", inside) and not piece.startswith("[^"):
                self._refuse(at, f"{piece!r:.40} names control characters, which JSON says by their numbers only")
        if flags := re.search(r"\(\?[^:=!<P]", "".join(piece for piece in pieces if len(piece) == 1)):
            self._refuse(
                at, f"flags as in {flags[0]!r} are not those of a schema's patterns; write both letters in sets"
            )
        return "".join(_written(piece) for piece in pieces)

    def _check_properties(self, schema: dict[str, Any], at: str) -> None:
        """Names that are not listed may come twice, and are counted each time."""
        least, required = schema.get("minProperties", 0), schema.get("required", [])
        if least > max(1, len(required)):
            self._refuse(f"{at}.minProperties", "can be held up to 1, or up to the number of required properties")

    def _told_apart(self, options: list[Any]) -> bool:
        """Whether a property that all options require has a value of its own in each, so that no value meets two."""
        values = [_required_values(self._root, option) for option in options]
        names = set.intersection(*(set(of_option) for of_option in values)) if values else set()
        for name in names:
            found = [value for of_option in values for value in of_option[name]]
            if len(set(found)) == len(found):
                return True
        return False

    def _refuse(self, at: str, rule: str) -> NoReturn:
        raise GrammarError([Fault(self._source.field, self._source.text, f"{at}: {rule}")])


def _required_values(root: Any, option: Any) -> dict[str, list[str]]:
    """The texts that each required property of an object may be, of those properties that list them."""
    if isinstance(option, dict) and "$ref" in option:
        option = _target(root, option["$ref"])
    if not isinstance(option, dict) or option.get("type") != "object":
        return {}
    listed = option.get("properties", {})
    texts = {}
    for name in option.get("required", []):
        part = listed.get(name, {}) if isinstance(listed, dict) else {}
        values = part.get("enum", [part["const"]] if "const" in part else []) if isinstance(part, dict) else []
        if values and all(isinstance(value, str) for value in values):
            texts[name] = values
    return texts


def _written(piece: str) -> str:
    """A piece of a pattern: a set, an escape or a character, so that no two readers of it differ.

    A set that leaves out less is written without the character 0: llguidance lets a set with all control characters
    match an escaped quote and backslash, in it or not.
    """
    if piece == ".":
        return r"[^\n\r\u2028\u2029]"
    if piece in (r"\s", r"\S"):
        return f"[{SPACES}]" if piece == r"\s" else f"[^{SPACES}{OTHER_SPACES}]"
    if re.match(r"\\P", piece):
        return rf"[^\p{piece[2:]}\x00]"
    if not piece.startswith("["):
        return piece
    few, many = SPACES, SPACES + OTHER_SPACES
    if piece.startswith("[^"):
        few, many, piece = many, few, rf"{piece[:-1]}\x00]"
    written = {r"\s": few, r"\S": f"[^{many}]"}
    return re.sub(r"\\.", lambda found: written.get(found[0], found[0]), piece, flags=re.DOTALL)


def _num_remainders(number: Any) -> int:
    """The significant digits of a number, as an integer: how many states tell its multiples apart."""
    if not isinstance(number, int | float):
        return 0
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))


def _plain(value: Any) -> Iterator[Any]:
    """Every value in a JSON value that is neither an object nor a list."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for below in value:
        yield from _plain(below)


def _no_number(schema: dict[str, Any]) -> bool:
    """Whether a number is asked for and no multiple of multipleOf lies between the bounds."""
    if schema.get("type") not in ("integer", "number") or not schema.get("multipleOf"):
        return False
    exact = {key: Fraction(str(schema[key])) for key in NUMBERS if type(schema.get(key)) in (int, float)}
    step = abs(exact["multipleOf"])
    if schema["type"] == "integer":
        step = Fraction(step.numerator)  # the smallest multiple of it that is an integer
    above, below = exact.get("exclusiveMinimum"), exact.get("exclusiveMaximum")
    least = max((exact[key] for key in ("minimum", "exclusiveMinimum") if key in exact), default=None)
    most = min((exact[key] for key in ("maximum", "exclusiveMaximum") if key in exact), default=None)
    if least is None or most is None:
        return False
    first, last = math.ceil(least / step), math.floor(most / step)
    return first + (first * step == above) > last - (last * step == below)


def _with_closed_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Say bounds of numbers in few digits, and open ones by the next such number, inwards."""
    made = dict(schema)
    for closed, opened, rounding, inner in (
        ("minimum", "exclusiveMinimum", ROUND_CEILING, max), ("maximum", "exclusiveMaximum", ROUND_FLOOR, min),
    ):  # fmt: skip
        bound, beyond = made.pop(closed, None), made.pop(opened, None)
        if isinstance(beyond, bool):  # as in draft 4
            bound, beyond = (None, bound) if beyond else (bound, None)
        found = [_rounded(bound, rounding, False)] if _is_number(bound) else []
        found += [_rounded(beyond, rounding, True)] if _is_number(beyond) else []
        if found:
            made[closed] = inner(found)
    return made


def _rounded(bound: float, rounding: str, is_open: bool) -> float:
    """The outermost number of few digits within a bound: llguidance rounds the others outwards, and a reader rounds
    one with more digits to the bound itself."""
    exact = Decimal(str(bound))
    step = Decimal(1).scaleb(max(exact.adjusted() - NUM_DIGITS + 1, -NUM_DIGITS))
    found = exact.quantize(step, rounding)
    if is_open and found == exact:
        found += step if rounding == ROUND_CEILING else -step
    return int(found) if isinstance(bound, int) and not is_open else float(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Say a format by its own pattern."""
    pattern = PATTERNS.get(schema.get("format", ""))
    if pattern is None:
        return schema
    made = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in made:
        return {**made, "pattern": pattern}
    return {**made, "allOf": [*made.get("allOf", []), {"pattern": pattern}]}


def _endless(root: Any) -> set[str]:
    """The references to parts that only endless texts would meet: the least fixed point of what a finite text meets.

    References that leave the document, and those of one with names inside ($id), count as meetable.
    """
    places: dict[str, Any] = {}
    for schema in _schemas(root):
        if isinstance(schema.get("$ref"), str):
            places[schema["$ref"]] = None
        if "$id" in schema and schema is not root:
            return set()
    targets = {ref: _target(root, ref) for ref in places}
    left = [ref for ref, target in targets.items() if target is not None]
    endless = set(left)
    for _ in range(MAX_PASSES):
        left.reverse()  # a chain of references is short in one of the orders
        for ref in left:
            if _met(targets[ref], endless):
                endless.discard(ref)
        if len(endless) == len(left):
            return endless
        left = [ref for ref in left if ref in endless]
    return set()


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and those below it."""
    left = [schema]
    while left:
        schema = left.pop()
        if isinstance(schema, dict):
            yield schema
            for key, value in schema.items():
                if key in OF_NAMES and isinstance(value, dict):
                    left.extend(value.values())
                elif key in OF_LISTS and isinstance(value, list):
                    left.extend(value)
                elif key in OF_ONE:
                    left.append(value)


def _target(root: Any, ref: str) -> Any:
    """What a reference of the form #/a/b names; None for another form or nothing there."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = root
    for step in ref[2:].split("/") if ref != "#" else []:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _met(schema: Any, endless: set[str]) -> bool:
    """Whether a finite text may meet a schema if none meets these references. In doubt it may."""
    if not isinstance(schema, dict):
        return schema is not False
    if schema.get("$ref") in endless or not all(_met(item, endless) for item in _items(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_met(item, endless) for item in _items(schema, key)):
            return False
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    return "const" in schema or "enum" in schema or any(_met_by(kind, schema, endless) for kind in types)


def _met_by(kind: Any, schema: dict[str, Any], endless: set[str]) -> bool:
    """Whether a finite value of one type may meet a schema."""
    if kind == "object":
        listed, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(_met(listed.get(name, others), endless) for name in schema.get("required", []))
    if kind == "array":
        first, rest = _items(schema, "prefixItems"), schema.get("items", True)
        least = schema.get("minItems", 0)
        needed = [*first[:least], *([rest] if least > len(first) else [])]
        return all(_met(item, endless) for item in needed)
    return True


def _items(schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key, [])
    return found if isinstance(found, list) else []
