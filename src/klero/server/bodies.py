"""From bytes to fields: JSON that means one thing, and the part of a body that a model describes."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from klero.errors import Fault
from klero.params.aliases import ALIASES, NEAREST
from klero.server.errors import MOST_FAULTS, bad_request, faults_of
from klero.server.fields import FIELDS
from klero.server.schemas import Strict

B = TypeVar("B", bound=Strict)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_STAND_INS: dict[str, Any] = {"prompt": "-", "messages": [{"role": "user", "content": "-"}], "tokens": []}


def read_body(raw: bytes) -> dict[str, Any]:
    """The object of a body. ApiError 400 for what is no JSON, or none that means one thing, or no text."""
    try:
        text = raw.decode()
        body = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
        if _SURROGATE.search(text):
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise bad_request("the body is nested too deep; flatten it") from None
    except UnicodeEncodeError:
        raise bad_request("the body holds half of a surrogate pair; give both halves") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise bad_request(f"the body must be JSON in UTF-8: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = dict(pairs)
    if len(entries) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!a:.40} is twice a key of one object; leave one of the two out")
    return entries


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is beyond binary64")
    return value


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
