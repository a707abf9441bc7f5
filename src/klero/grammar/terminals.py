"""The cost of a Lark grammar's terminals, which llguidance makes one expression of each without counting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from klero.grammar.patterns import MAX_OPTIONAL, check_optional, num_optional

TOKEN = re.compile(
    r"""(?P<note>//[^\n]*|\#[^\n]*)|(?P<text>"(?:\\[^\n]|[^"\\\n])*"?)|(?P<regex>/(?:\\[^\n]|[^/\\\n])+/?)"""
    r"""|(?P<define>[?!]*[A-Za-z_]\w*\s*(?:(?:\.-?\d+|\[[^\]\n]*\])\s*)?:)|(?P<name>[A-Za-z_]\w*)|(?P<json>%json)"""
    r"""|(?P<space>\s+)|(?P<other>.)""",
    re.DOTALL,
)
TERMINAL = re.compile(r"_?[A-Z]")
MAX_SIZE = 1_000_000
MAX_REGEX = 32_768
CAP = 10**9


class Body(NamedTuple):
    """A terminal: how much it says itself, of that how many pieces that may be left out, and whom it names."""

    size: int
    num_optional: int
    names: list[str]


def check_terminals(text: str, check_schema: Callable[[Any], None]) -> None:
    """Raise ValueError for a Lark grammar whose terminals would take too long to follow, written out.

    A terminal that names others has their size, each time. check_schema: called with what follows each %json.
    """
    bodies = _bodies(text, check_schema)
    weights = _weights(bodies)
    total = sum(num_pieces**2 for _, num_pieces in weights)
    if total > MAX_OPTIONAL**2:
        raise ValueError(
            f"too many pieces of its terminals may be left out or repeated, {MAX_OPTIONAL} can be followed; "
            "say a repetition by a count, or with rules instead of terminals"
        )
    if max((size for size, _ in weights), default=0) > MAX_SIZE:
        raise ValueError(f"a terminal is longer than {MAX_SIZE} pieces, written out; say it with rules")


def check_regex(text: str) -> None:
    """Raise ValueError for a regular expression that is longer than can be followed."""
    if len(text.encode()) > MAX_REGEX:
        raise ValueError(f"may have {MAX_REGEX} bytes; say repetitions by counts, or write a grammar")
    check_optional(text)


def _bodies(text: str, check_schema: Callable[[Any], None]) -> dict[str, Body]:
    """The terminals by name; each regular expression in a rule is one too."""
    found: dict[str, Body] = {}
    place, size_of_all, key, before = 0, 0, "", ""
    while match := TOKEN.match(text, place):
        kind, piece, place = match.lastgroup or "", match[0], match.end()
        if kind in ("note", "space"):
            continue
        if kind == "define":
            _add(found, key, "", int(before == "|"))
            name = piece.lstrip("?!")
            key = re.split(r"\W", name)[0] if TERMINAL.match(name) else ""
        elif kind == "json":
            place = _checked_json(text, place, check_schema)
        elif kind == "regex":
            size_of_all += len(piece)
            if size_of_all > MAX_REGEX:
                raise ValueError(f"its regular expressions may have {MAX_REGEX} bytes in all")
            _add(found, key or f"/{len(found)}", piece, num_optional(piece))
        else:
            is_nothing = piece == '""' or (before in ("|", "(", "") and piece in ("|", ")"))
            _add(found, key, piece, int(is_nothing or piece in ("*", "+", "?", "{", "[")))
        before = "" if kind == "define" else piece
    return found


def _add(found: dict[str, Body], key: str, piece: str, optional: int) -> None:
    if key:
        body = found.setdefault(key, Body(0, 0, []))
        if TERMINAL.match(piece):
            body.names.append(piece)
        found[key] = Body(body.size + len(piece), body.num_optional + optional, body.names)


def _checked_json(text: str, place: int, check_schema: Callable[[Any], None]) -> int:
    """Check the JSON at a place, and return where it ends."""
    place += len(text[place:]) - len(text[place:].lstrip())
    try:
        schema, place = json.JSONDecoder().raw_decode(text, place)
    except ValueError as error:
        raise ValueError(f"no JSON follows %json: {error}") from None
    check_schema(schema)
    return place


def _weights(bodies: dict[str, Body]) -> list[tuple[int, int]]:
    """Size and number of optional pieces of each terminal, with those of whom it names.

    Terminals that name each other in a circle have none: llguidance refuses them.
    """
    users: dict[str, list[str]] = {}
    for key, body in bodies.items():
        for name in body.names:
            users.setdefault(name, []).append(key)
    missing = {key: sum(name in bodies for name in body.names) for key, body in bodies.items()}
    weights = {key: (body.size, body.num_optional) for key, body in bodies.items()}
    left = [key for key, number in missing.items() if not number]
    while left:
        size, optional = weights[key := left.pop()]
        for user in users.get(key, []):
            weights[user] = min(CAP, weights[user][0] + size), min(CAP, weights[user][1] + optional)
            missing[user] -= 1
            if not missing[user]:
                left.append(user)
    return [weight for key, weight in weights.items() if not missing[key]]
