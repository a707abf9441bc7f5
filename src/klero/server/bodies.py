"""From bytes to fields: JSON that means one thing, and the part of a body that a model describes."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from klero.errors import Fault
from klero.params.aliases import ALIASES, NEAREST
from klero.server.errors import MOST_FAULTS, Unreadable, bad_request, faults_of, refusal_of
from klero.server.fields import FIELDS
from klero.server.schemas import Strict

B = TypeVar("B", bound=Strict)
MOST_NESTING = 128
TOO_DEEP = f"is nested more than {MOST_NESTING} deep; flatten it"
HALF = "holds half of a surrogate pair; give both halves"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_STAND_INS: dict[str, Any] = {"prompt": "-", "messages": [{"role": "user", "content": "-"}], "tokens": []}


def read_body(raw: bytes) -> dict[str, Any]:
    """The object of a body. ApiError 400 for what is no JSON.

    A field that says what means nothing (NaN, a number beyond binary64, a key twice in an object, half a character,
    far too many levels) is `Unreadable` as a whole, and is told beside whatever else is wrong.
    """
    try:
        text = raw.decode()
        body = _json(text)
    except RecursionError:
        raise _too_deep(text) from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise bad_request(f"the body must be JSON in UTF-8: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    halves = _SURROGATE.search(text) is not None and not _is_whole(body)
    fields = {name: _trouble(value) or value for name, value in body.items()}
    if isinstance(body, _Twice):
        fields |= {name: Unreadable("...", "is twice in the body; leave one of the two out") for name in body.twice}
    if not halves:
        return fields
    return {_written(name): _half(name, value) for name, value in fields.items()}


class _Twice(dict[str, Any]):
    """An object with keys that come more than once: `twice`."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]


def _json(text: str) -> Any:
    """The value of a text, with `Unreadable` and `_Twice` in it. RecursionError, ValueError."""
    hooks: dict[str, Any] = {"object_pairs_hook": _object, "parse_constant": _constant, "parse_float": _float}
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer with more digits than Python reads
        return json.loads(text, parse_int=_integer, **hooks)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = dict(pairs)
    return entries if len(entries) == len(pairs) else _Twice(pairs)


def _constant(word: str) -> Any:
    return Unreadable(word, "is no number of JSON; give a finite one, or leave it out")


def _float(text: str) -> Any:
    value = float(text)
    return value if math.isfinite(value) else Unreadable(f"{text:.40}", "is beyond binary64; give a smaller number")


def _integer(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return Unreadable(f"{text:.20}...", f"is an integer of {len(text)} digits; give a smaller one")


_LOOKED_INTO = frozenset((dict, list, _Twice, Unreadable))


def _trouble(value: Any) -> Unreadable | None:
    """What means nothing in a value, the outermost of it; None where all means something. One level after the other, as
    recursion would end where the nesting is what is wrong."""
    level = [value] if type(value) in _LOOKED_INTO else []
    for _ in range(MOST_NESTING):
        for part in level:
            if isinstance(part, Unreadable):
                return part
            if isinstance(part, _Twice):
                return Unreadable(f"{part.twice[0]!a:.40}", "is twice a key of one object; leave one of the two out")
        if not level:
            return None
        level = [item for part in level for item in _items(part) if type(item) in _LOOKED_INTO]
    return Unreadable("[...]", TOO_DEEP)


def _items(part: Any) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part


def _is_whole(value: Any) -> bool:
    """Whether a value has only whole characters."""
    try:
        json.dumps(value, ensure_ascii=False, default=repr).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _half(name: str, value: Any) -> Any:
    whole = isinstance(value, Unreadable) or (_is_whole(name) and _is_whole(value))
    return value if whole else Unreadable(f"{_written(str(value)):.40}", HALF)


def _written(name: str) -> str:
    """A name that can be written, half characters as \\ud800."""
    return name.encode("utf-8", "backslashreplace").decode()


def _too_deep(text: str) -> Exception:
    """400 for a body that is nested too deep to be read, with the field that it happens in."""
    depth, name = 0, ""
    for found in _STRING_OR_BRACKET.finditer(text):
        piece = found[0]
        if piece in "[{":
            depth += 1
        elif piece in "]}":
            depth -= 1
        elif depth == 1:
            name = piece
        if depth > MOST_NESTING:
            break
    if text.lstrip()[:1] != "{" or not name:
        return bad_request(f"the body {TOO_DEEP}")
    return refusal_of([Fault(_written(str(json.loads(name)))[:64], Unreadable("[...]", TOO_DEEP), "")])


def parsed(own: dict[str, Any], model: type[B]) -> tuple[B, list[Fault]]:
    """A body's own fields, and what is wrong with them. For those at fault it has nothing, or a stand-in if it must."""
    try:
        return model.model_validate(own), []
    except ValidationError as error:
        places = {str(one["loc"][0]) for one in error.errors(include_url=False, include_context=False)}
        good = {name: value for name, value in own.items() if name not in places}
        good |= {name: _STAND_INS[name] for name in places if name in _STAND_INS}
        return model.model_validate(good), faults_of(error)


def place_of(fault: Fault) -> str:
    """The field of a body that a fault is in: messages of messages[0].role."""
    return re.split(r"[.\[]", fault.field, maxsplit=1)[0]


def unknown(names: Sequence[tuple[str, Any]], known: Sequence[str]) -> list[Fault]:
    """A fault for each field that nobody knows, of very many for the first. known: the fields that there are."""
    return [Fault(name[:64], value, _rule_of_unknown(name, known)) for name, value in names[: MOST_FAULTS + 1]]


def _rule_of_unknown(name: str, known: Sequence[str]) -> str:
    if name in NEAREST and NEAREST[name] in known:
        return f"is not known here; did you mean {NEAREST[name]}? docs/porting.md says what differs"
    close = difflib.get_close_matches(name[:64], known, n=1)
    return "is not known here" + (f"; did you mean {close[0]}?" if close else "; leave it out")


SAMPLING = [*FIELDS, *(alias for alias, field in ALIASES.items() if field in FIELDS)]
"""What bodies of both routes may have beside their own fields."""
