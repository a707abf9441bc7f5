"""JSON as a value: read strictly, and written in one way only, so that what is asked can be hashed and compared."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from klero.params.checks import Broken

MAX_BYTES = 2**18
MAX_NESTING = 64
TOO_LONG = f"must be at most {MAX_BYTES} bytes of UTF-8; ask for less in one request"
TOO_DEEP = f"must be JSON nested at most {MAX_NESTING} deep; name the inner parts in $defs, or flatten it"
TOO_LARGE = "must be JSON whose numbers are finite in binary64; give a smaller one, or leave it out"
SURROGATE = "must be whole characters, and half of a surrogate pair stands alone in it; give both halves"
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def check_text(text: str) -> str:
    """The text, if it is at most MAX_BYTES of UTF-8. Raises Broken, also for what has no UTF-8: a lone surrogate."""
    if len(text) > MAX_BYTES:
        raise Broken(TOO_LONG)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise Broken(SURROGATE) from None
    if num_bytes > MAX_BYTES:
        raise Broken(TOO_LONG)
    return text


def read_json(text: str) -> Any:
    """The value of a JSON text. Broken for what is none, for NaN, a key twice in an object, and too deep a nesting."""
    check_text(text)
    depth = 0
    for found in STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > MAX_NESTING:
            raise Broken(TOO_DEEP)
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer, parse_float=_float
        )
    except ValueError as error:
        raise Broken(f"must be JSON, and it is none: {error}") from None


def write_json(value: Any) -> str:
    """A value as JSON: compact, keys in their order. Broken for what JSON has no word for, too long or too deep."""
    pieces: list[str] = []
    left = MAX_BYTES  # counted while writing: a list in itself, or one list in many places, has no end
    for piece in _pieces(value, 1):
        left -= len(piece)
        if left < 0:
            raise Broken(TOO_LONG)
        pieces.append(piece)
    return check_text("".join(pieces))


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """The text of a value, piece by piece. depth: of an object or array at this place."""
    if not isinstance(value, Mapping | list | tuple):
        yield _scalar(value)
        return
    if depth > MAX_NESTING:
        raise Broken(TOO_DEEP)
    is_object = isinstance(value, Mapping)
    yield "{" if is_object else "["
    for i, item in enumerate(value.items() if isinstance(value, Mapping) else value):
        yield "," if i else ""
        if is_object:
            key, item = item
            if not isinstance(key, str):
                raise Broken(f"must be JSON, whose keys are text; give text for the {type(key).__name__} among them")
            yield _scalar(key) + ":"
        yield from _pieces(item, depth + 1)
    yield "}" if is_object else "]"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, numbers.Integral):
        return str(_in_range(int(value)))
    if isinstance(value, float | np.floating):
        return repr(_in_range(float(value)))
    raise Broken(f"must be JSON: dicts, lists, text, numbers, bools and None, and no {type(value).__name__}")


def _in_range(number: Any) -> Any:
    try:
        finite = math.isfinite(number)
    except OverflowError:  # an integer beyond binary64
        finite = False
    if not finite:
        raise Broken(TOO_LARGE)
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise Broken(f"must be JSON, and {key!r:.40} is twice a key of one object; leave one of the two out")
        entries[key] = value
    return entries


def _constant(word: str) -> Any:
    raise Broken(f"must be JSON, and {word} is no number of JSON; leave it out")


def _integer(text: str) -> int:
    if len(text) > 310:  # no binary64 has more digits, and reading them takes time
        raise Broken(TOO_LARGE)
    return int(_in_range(int(text)))


def _float(text: str) -> float:
    return float(_in_range(float(text)))
