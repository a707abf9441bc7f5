"""Grammars of every kind as one Lark grammar, the language that llguidance reads."""

from __future__ import annotations

import json
import re
from typing import Any

from klero.errors import GrammarError
from klero.grammar.cost import Cost
from klero.grammar.gbnf import is_gbnf, lark_of_gbnf
from klero.grammar.schema import held_schema
from klero.grammar.source import Source
from klero.grammar.tags import lark_of_tags
from klero.grammar.terminals import check_regex, check_terminals

OPTIONS = '\n%llguidance {"no_forcing": true, "allow_invalid_utf8": false}\n'
"""After every grammar, so that nobody's own options come later. no_forcing: where only one text may follow, every
token that begins it is allowed, rather than the one that llguidance would choose. Bytes that are not UTF-8 would
match the names of special tokens."""

ESCAPES = 'nrbtf\\"'
"""What may follow a backslash in a JSON string. Not u: a property's name spelled with it would pass as another name."""


def lark_of(source: Source) -> str:
    """Return the Lark grammar of a source; GrammarError for one that can be seen to be wrong without a compiler."""
    try:
        return _rules(source) + OPTIONS
    except (ValueError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        raise source.refused(f"cannot be read: {error}") from None


def _rules(source: Source) -> str:
    cost = Cost()
    if source.kind == "json":
        return f"start: {json_rule(source, json.loads(source.text), cost)}"
    if source.kind == "json_object":
        return f"start: {json_rule(source, {'type': 'object'}, cost)}"
    if source.kind == "regex":
        return f"start: TEXT\nTEXT: {regex_terminal(source)}"
    if source.kind == "choice":
        return "start: TEXT\nTEXT: " + "\n | ".join(literal(text) for text in json.loads(source.text))
    if source.kind == "grammar":
        lark = lark_of_gbnf(source.text) if is_gbnf(source.text) else source.text
        check_terminals(lark, lambda schema: _check_schema(source, schema, cost))
        return lark
    return lark_of_tags(json.loads(source.text), lambda schema: json_rule(source, schema, cost))


def json_rule(source: Source, schema: Any, cost: Cost) -> str:
    """Return the rule of a JSON value under a schema, with a bounded amount of whitespace.

    GrammarError for a schema that says what llguidance would not hold.
    """
    held = held_schema(source, schema, cost)
    if held is False:
        raise source.refused("no JSON meets it: what is required is false, or requires itself without end")
    layout: dict[str, Any] = {"json_allowed_escapes": ESCAPES, "whitespace_flexible": False}
    if source.whitespace:
        layout["whitespace_pattern"] = rf"[ \n]{{1,{source.whitespace}}}"
    return "%json " + json.dumps({"x-guidance": layout, **({} if held is True else held)}, ensure_ascii=False)


def regex_terminal(source: Source) -> str:
    """Return a regular expression as a Lark terminal. A slash and a line break would end it, and are escaped."""
    check_regex(source.text)
    if "\n" in source.text and re.search(r"\(\?[a-zA-Z]*x", source.text):
        raise source.refused("has line breaks under (?x), where they mean nothing; write it in one line")
    pieces = re.findall(r"\\.|[^\\]|\\$", source.text, re.DOTALL)
    return "/" + "".join({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(piece, piece) for piece in pieces) + "/"


def literal(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _check_schema(source: Source, schema: Any, cost: Cost) -> None:
    """Refuse in a Lark grammar the schemas that are refused elsewhere; x-guidance is its author's own."""
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    held_schema(source, schema, cost)
