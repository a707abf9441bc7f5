"""The forms in which models write calls of tools, and how each is read: to the letter, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One call. arguments: JSON text."""

    name: str
    arguments: str


Parse = Callable[[str, frozenset[str]], list[Call] | None]


class Form(NamedTuple):
    """How a model writes calls: between a begin and an end, or as its whole answer where begin is "".

    with_end: the end belongs to what is read. declared: what a template of this form holds; not: what none of it holds.
    tag: begin of one call up to its arguments, as a format string with the name, and what follows them; "" for none.
    """

    name: str
    begin: str
    end: str
    parse: Parse
    declared: tuple[str, ...] = ()
    undeclared: tuple[str, ...] = ()
    with_end: bool = False
    tag: tuple[str, str] | None = None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_BLANK = re.compile(r"[ \t\n\r]*")


def _behind(text: str, at: int, mark: str) -> int:
    """Where a text goes on behind a mark and the blanks around it. ValueError where the mark does not stand."""
    at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark} at {at}")
    return _BLANK.match(text, at + len(mark)).end()  # type: ignore[union-attr]


def _object(text: str, at: int = 0) -> tuple[dict[str, str], int]:
    """The members of a JSON object as they are written, and where the text goes on. ValueError for what is none."""
    at, members = _behind(text, at, "{"), dict[str, str]()
    while not text.startswith("}", at):
        if members:
            at = _behind(text, at, ",")
        name, at = _DECODER.raw_decode(text, at)
        at = _behind(text, at, ":")
        _, end = _DECODER.raw_decode(text, at)
        if not isinstance(name, str) or name in members:
            raise ValueError(f"{name!r} is no name, or one that was there")
        members[name], at = text[at:end], _behind(text, end, "")
    return members, _behind(text, at, "}")


def _call(members: Mapping[str, str], names: frozenset[str], key: str) -> Call:
    """One call out of the members of its object. ValueError for none, or one of a function that nobody named."""
    if set(members) - {"id"} != {"name", key} or not members[key].startswith("{"):
        raise ValueError("is no call")
    name = json.loads(members["name"])
    if not isinstance(name, str) or name not in names:
        raise ValueError("is of no function")
    return Call(name, members[key])


def _parser(read: Callable[[str, frozenset[str]], list[Call]]) -> Parse:
    """None instead of an error."""

    def parse(text: str, names: frozenset[str]) -> list[Call] | None:
        try:
            return read(text.strip(), names) or None
        except (ValueError, RecursionError):
            return None

    return parse


def _ends(text: str, at: int) -> None:
    if at < len(text):
        raise ValueError("does not end there")


@_parser
def _one(text: str, names: frozenset[str]) -> list[Call]:
    """{"name": ..., "arguments": {...}}"""
    members, at = _object(text)
    _ends(text, at)
    return [_call(members, names, "arguments")]


@_parser
def _list(text: str, names: frozenset[str]) -> list[Call]:
    """[{"name": ..., "arguments": {...}}, ...]"""
    at, calls = _behind(text, 0, "["), list[Call]()
    while not text.startswith("]", at):
        members, at = _object(text, _behind(text, at, ",") if calls else at)
        calls.append(_call(members, names, "arguments"))
    _ends(text, at + 1)
    return calls


@_parser
def _named(text: str, names: frozenset[str]) -> list[Call]:
    """name[ARGS]{...}, or name[CALL_ID]id[ARGS]{...}"""
    head, _, arguments = (part.strip() for part in text.partition("[ARGS]"))
    _, at = _DECODER.raw_decode(arguments)
    _ends(arguments, at)
    name = head.partition("[CALL_ID]")[0].strip()
    return [_call({"name": json.dumps(name), "arguments": arguments}, names, "arguments")]


@_parser
def _parameters(text: str, names: frozenset[str]) -> list[Call]:
    """{"name": ..., "parameters": {...}}; ..., which may stand behind <|python_tag|>."""
    text, calls, at = text.removeprefix("<|python_tag|>"), list[Call](), 0
    while at < len(text):
        members, at = _object(text, _behind(text, at, ";") if calls else at)
        calls.append(_call(members, names, "parameters"))
        if text[at:] == ";":
            break
    return calls


HERMES = Form(
    "hermes", "<tool_call>", "</tool_call>", _one, ("<tool_call>", "arguments"), ("<function=", "<arg_key>"),
    tag=('<tool_call>\n{{"name": "{}", "arguments": ', "}\n</tool_call>"),
)  # fmt: skip
MISTRAL_NAMED = Form("mistral, with [ARGS]", "[TOOL_CALLS]", "}", _named, ("[TOOL_CALLS]", "[ARGS]"), with_end=True)
MISTRAL = Form("mistral", "[TOOL_CALLS]", "]", _list, ("[TOOL_CALLS]",), ("[ARGS]",), with_end=True)
LLAMA3 = Form("llama 3", "", "", _parameters, ("Environment: ipython", "parameters"))
FORMS = (HERMES, MISTRAL_NAMED, MISTRAL, LLAMA3)
"""Of several that a template declares the first counts."""

INNER_MARKS = ("[ARGS]", "[CALL_ID]", "<|python_tag|>")

GUIDED = Form("guided", "", "", _one)
"""Of an answer that a grammar holds to one call."""


def form_of(template: str) -> Form | None:
    """How a chat template says that calls are written; None for a way that is not known here."""
    for form in FORMS:
        if all(word in template for word in form.declared) and not any(word in template for word in form.undeclared):
            return form
    return None
