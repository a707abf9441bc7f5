"""Grammars written as GBNF (`root ::= ...`), as Lark grammars.

Rules that lead to no recursion become one regular expression, so that their texts are told apart by every character of
them; the others are rules of an Earley parser over such expressions, which takes the longest text of each.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import NamedTuple, NoReturn

from klero.grammar.least import Facts

RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
PIECE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
NAMED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)|(?P<line>\n)|(?P<define>[\w-]+[ \t]*::=)|(?P<name>[\w-]+)"""
    r"""|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\\n])+\])"""
    r"""|(?P<count>[*+?]|\{[ \t]*\d+[ \t]*(?:,[ \t]*\d*[ \t]*)?\})"""
    r"""|(?P<sign>[()|.])""",
    re.DOTALL,
)
MAX_DEPTH = 24


class Token(NamedTuple):
    kind: str
    text: str
    line: int


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF rather than Lark: whether a line defines a rule by ::=."""
    return RULE.search(text) is not None


def lark_of_gbnf(text: str) -> str:
    """Return GBNF as a Lark grammar whose rule `start` is the rule `root`; ValueError if it is malformed.

    A text in quotes, a set in brackets, `.`, names, groups, `|`, and `* + ? {m} {m,} {m,n}`; escapes are
    \\n \\r \\t \\\\ \\" \\[ \\] \\- \\^ \\xHH \\uHHHH \\UHHHHHHHH; a comment begins with #.
    """
    rules = _rules(_tokens(text))
    if "root" not in rules:
        raise ValueError("no rule is called root")
    uses = {name: {token.text for token in body if token.kind == "name"} for name, body in rules.items()}
    for name, used in uses.items():
        if missing := sorted(other for other in used if other not in rules):
            raise ValueError(f"the rule {missing[0]!r}, which {name!r} uses, is missing")
    if endless := sorted(rules.keys() - _with_end(rules)):
        raise ValueError(f"the rule {endless[0]!r} has no end: each of its texts contains another of it")
    flat = _flat(uses)
    number = {name: index for index, name in enumerate(rules)}
    called = {name: f"{'T' if name in flat else 'r'}{number[name]}" for name in rules}
    lines = [f"start: {called['root']}"]
    for name, body in rules.items():
        lines.append(f"{called[name]}: {_body(body, called)}")
    return "\n".join(lines)


def _tokens(text: str) -> list[Token]:
    found, place, line = [], 0, 1
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"line {line}: {text[place : place + 20]!r} is not understood")
        kind = match.lastgroup or ""
        if kind != "space":
            found.append(Token(kind, match.group(), line))
        line += match.group().count("\n")
        place = match.end()
    return found


def _rules(tokens: list[Token]) -> dict[str, list[Token]]:
    """The bodies of the rules by name, checked and without line breaks."""
    rules: dict[str, list[Token]] = {}
    body: list[Token] | None = None
    depth, before = 0, Token("line", "\n", 1)
    for token in tokens:
        if token.kind == "define":
            if depth or before.kind != "line":
                _wrong(token)
            name = token.text[: -len("::=")].rstrip()
            if name in rules:
                raise ValueError(f"line {token.line}: the rule {name!r} is there twice")
            body = rules[name] = []
            before = token
            continue
        if token.kind == "line":
            if not depth and before.text != "|" and before.kind != "define":
                before = token
            continue
        if body is None or (before.kind == "line" and token.text != "|"):
            _wrong(token)
        depth += (token.text == "(") - (token.text == ")")
        if depth > MAX_DEPTH:
            raise ValueError(f"line {token.line}: groups may be nested {MAX_DEPTH} deep; give the inner ones a rule")
        if depth < 0 or (token.kind == "count" and (before.kind in ("line", "count", "define") or before.text in "(|")):
            _wrong(token)
        body.append(token)
        before = token
    if depth:
        raise ValueError("a group is not closed")
    return rules


def _wrong(token: Token) -> NoReturn:
    raise ValueError(f"line {token.line}: {token.text!r:.40} may not stand here")


def _with_end(rules: dict[str, list[Token]]) -> set[str]:
    """The rules that have a text."""
    facts = Facts()
    fact_of = {name: facts.add() for name in rules}
    for name, body in rules.items():
        stack: list[tuple[list[int], list[int]]] = [([], [])]  # of each open group: its alternatives, and this one
        for token, after in itertools.pairwise([*body, Token("line", "", 0)]):
            alternatives, here = stack[-1]
            if token.text == "(" and token.kind == "sign":
                stack.append(([], []))
            elif token.text == "|" and token.kind == "sign":
                alternatives.append(facts.all_of(here))
                stack[-1] = (alternatives, [])
            elif token.kind != "count":
                needed = fact_of[token.text] if token.kind == "name" else facts.all_of(())
                if token.text == ")" and token.kind == "sign":
                    stack.pop()
                    needed = facts.any_of([*alternatives, facts.all_of(here)])
                if after.kind != "count" or not (after.text in "*?" or re.match(r"\{\s*0+\s*[,}]", after.text)):
                    stack[-1][1].append(needed)
        alternatives, here = stack[0]
        facts.follows(fact_of[name], [*alternatives, facts.all_of(here)], 1)
    return _names(facts, fact_of)


def _flat(uses: dict[str, set[str]]) -> set[str]:
    """The rules that lead to no recursion."""
    facts = Facts()
    fact_of = {name: facts.add() for name in uses}
    for name, used in uses.items():
        facts.follows(fact_of[name], [fact_of[other] for other in used], len(used))
    return _names(facts, fact_of)


def _names(facts: Facts, fact_of: dict[str, int]) -> set[str]:
    holds = facts.holding()
    return {name for name, fact in fact_of.items() if holds[fact]}


def _body(body: list[Token], called: dict[str, str]) -> str:
    """The right side of a rule. Where GBNF leaves an alternative empty, Lark wants an empty text."""
    made, before = [], "|"
    for text in [*(_lark(token, called) for token in body), "|"]:
        if before in ("|", "(") and text in ("|", ")"):
            made.append('""')
        made.append(text)
        before = text
    return " ".join(made[:-1])


def _lark(token: Token, called: dict[str, str]) -> str:
    if token.kind == "name":
        return called[token.text]
    if token.kind == "text":
        return json.dumps(ESCAPE.sub(_unescaped, token.text[1:-1]), ensure_ascii=False)
    if token.kind == "set":
        return _set(token)
    if token.text == ".":
        return "/(?s:.)/"
    return token.text.replace(" ", "").replace("\t", "")


def _set(token: Token) -> str:
    """A set of characters, every one of them by its number."""
    inside = token.text[1:-1]
    sign = "^" if inside.startswith("^") else ""
    pieces = PIECE.findall(inside, len(sign))
    made = ""
    for index, piece in enumerate(pieces):
        if piece == "-" and 0 < index < len(pieces) - 1:
            made += "-"
        else:
            made += rf"\u{{{ord(ESCAPE.sub(_unescaped, piece)):X}}}"
    return f"/[{sign}{made}]/"


def _unescaped(match: re.Match[str]) -> str:
    number = match[1] or match[2] or match[3]
    if number:
        return chr(int(number, 16))
    if match[4] not in NAMED:
        raise ValueError(f"the escape {match.group()!r} is not known")
    return NAMED[match[4]]
