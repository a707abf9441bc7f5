"""Grammars compiled and followed by xgrammar, behind the same protocol. Optional: the extra `xgrammar`."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import GrammarError, MissingExtra
from klero.grammar.ends import EndedMatcher, bytes_of_tokens
from klero.grammar.gbnf import is_gbnf, lark_of_gbnf
from klero.grammar.patterns import pieces_of
from klero.grammar.protocol import Matcher, TokenText
from klero.grammar.schema import held_schema
from klero.grammar.source import Source
from klero.grammar.tags import check_tags
from klero.grammar.terminals import check_regex

I32 = npt.NDArray[np.int32]

MAX_CACHE_BYTES = 2**28
OF_TYPE = {
    "null": set(), "boolean": set(), "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum"}, "string": {"pattern", "minLength", "maxLength"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}  # fmt: skip
"""The keywords that xgrammar holds beside each type."""
PYTHON: dict[str, Any] = {
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list,
    "object": dict,
}  # fmt: skip
ANYWHERE = {"$schema", "$defs", "definitions"}
ALONE = ("$ref", "anyOf", "const", "enum")
"""The keywords beside which it drops all others."""
LOOKS = r"\(\?(?!:)"
PLAIN = r"\\[dw]|\\[^\w\"\\]"
SAYABLE = re.compile(rf"{PLAIN}|[^\x00-\x1f\x7f\"\\.\[]|\[(?!\^)(?:{PLAIN}|[^\x00-\x1f\x7f\"\\])*\]")
"""A piece of a pattern that stands for no character that a JSON string escapes: xgrammar writes them as they are."""


class XGrammar:
    """Compile grammars, and fill masks of num_tokens ids. num_threads: those of compiling.

    text: the bytes of the ids below num_tokens. Special tokens match no text, ids without text are never allowed. It
    takes GBNF but no Lark, and refuses what it would read more loosely than it is meant. Unlike llguidance it has no
    measure of work: a grammar may take long to compile. MissingExtra without xgrammar.
    """

    def __init__(self, text: TokenText, num_tokens: int, num_threads: int = 1) -> None:
        self.num_tokens = num_tokens
        self.library = _library()
        tokens, special = bytes_of_tokens(text, num_tokens)
        for token_id in special:
            tokens[token_id] = b""
        information = self.library.TokenizerInfo(
            [*tokens, b""], self.library.VocabType.RAW, vocab_size=num_tokens + 1, stop_token_ids=[num_tokens]
        )
        self._has_text = [bool(data) for data in tokens]
        self._compiler = self.library.GrammarCompiler(
            information, max_threads=num_threads, cache_limit_bytes=MAX_CACHE_BYTES
        )

    def compile(self, source: Source) -> XGrammarGrammar:
        """Compile a grammar and make its first mask; GrammarError if it cannot be, or allows no text."""
        try:
            made = self._compile(source)
        except (RuntimeError, ValueError, RecursionError) as error:
            if isinstance(error, GrammarError):
                raise
            raise source.refused(f"is not a grammar that can be followed: {_reason(error)}") from None
        grammar = XGrammarGrammar(self, source, made)
        words = np.empty(self.num_tokens // 32 + 1, np.int32)
        matcher = grammar.start()
        matcher.fill_next_token_bitmask(words[None], 0)
        if not words.any():
            raise source.refused("allows no text")
        return grammar

    def fill_all(self, matchers: Sequence[Matcher], masks: I32) -> list[GrammarError | None]:
        """Write matcher r's mask into row r; its error and a row of zeros where it has none."""
        errors: list[GrammarError | None] = [None] * len(matchers)
        for r, matcher in enumerate(matchers):
            try:
                matcher.fill(masks[r])
            except GrammarError as error:
                errors[r] = error
                masks[r] = 0
        return errors

    def has_text(self, token_id: int) -> bool:
        """Whether an id has text."""
        return self._has_text[token_id]

    def _compile(self, source: Source) -> Any:
        if source.kind == "json":
            return self._json(source, _checked(source, json.loads(source.text)))
        if source.kind == "json_object":
            return self._json(source, {"type": "object", "additionalProperties": True})
        if source.kind == "regex":
            return self._compiler.compile_regex(_checked_regex(source))
        if source.kind == "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source.text)]
            return self._compiler.compile_grammar(f"root ::= {' | '.join(texts)}")
        if source.kind == "structural_tag":
            return self._compiler.compile_structural_tag(self._tags(source))
        if not is_gbnf(source.text):
            raise source.refused("is Lark, which xgrammar does not read; write GBNF, or take llguidance")
        lark_of_gbnf(source.text)  # raises for what is malformed, and xgrammar might take
        return self._compiler.compile_grammar(source.text)

    def _json(self, source: Source, schema: Any) -> Any:
        return self._compiler.compile_grammar(self._grammar(source, schema))

    def _grammar(self, source: Source, schema: Any) -> Any:
        compact = not source.whitespace
        return self.library.Grammar.from_json_schema(
            json.dumps(schema, ensure_ascii=False),
            any_whitespace=not compact,
            separators=(",", ":") if compact else None,
            max_whitespace_cnt=None if compact else source.whitespace,
            strict_mode=True,
        )

    def _tags(self, source: Source) -> dict[str, Any]:
        """A structural tag in xgrammar's words."""
        tag = json.loads(source.text)
        check_tags(tag)
        tags = []
        for item in tag["structures"]:
            grammar = str(self._grammar(source, _checked(source, item["schema"])))
            content = {"type": "grammar", "grammar": grammar}
            tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
        triggered = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        return {"type": "structural_tag", "format": triggered}


class XGrammarGrammar:
    """A compiled grammar."""

    def __init__(self, backend: XGrammar, source: Source, made: Any) -> None:
        self._backend, self.source, self._made = backend, source, made

    def matcher(self, end_ids: tuple[int, ...]) -> XGrammarMatcher:
        """Make a matcher at the beginning of the text; end_ids: the tokens that end it."""
        return XGrammarMatcher(self._backend, self, end_ids)

    def start(self) -> Any:
        """A matcher of xgrammar's own. The compiled grammar that they share does not change."""
        return self._backend.library.GrammarMatcher(self._made)


class XGrammarMatcher(EndedMatcher):
    """What one sequence may still say."""

    def __init__(self, backend: XGrammar, grammar: XGrammarGrammar, end_ids: tuple[int, ...]) -> None:
        super().__init__(backend.num_tokens, end_ids)
        self.batch = backend
        self._grammar = grammar
        self._inner = grammar.start()

    def _make_mask(self) -> I32:
        made = np.empty(self.batch.num_tokens // 32 + 1, np.int32)
        try:
            self._inner.fill_next_token_bitmask(made[None], 0)
        except RuntimeError as error:
            raise self._grammar.source.refused(f"cannot be followed here: {_reason(error)}") from None
        if not made.any():
            raise self._grammar.source.refused("cannot be followed here: no token may come")
        return made

    def _take(self, token_id: int) -> bool:
        return self.batch.has_text(token_id) and bool(self._inner.accept_token(token_id))

    def _take_back(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)

    def _may_end(self) -> bool:
        return bool(self._inner.is_completed())


def _checked(source: Source, schema: Any) -> Any:
    """A schema as xgrammar holds it; GrammarError for what it would drop."""
    held = held_schema(source, schema)
    left = [held]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            _drop_type(item)
            _check_keywords(source, item)
            for key in ("properties", "$defs", "definitions"):
                left.extend(item.get(key, {}).values())
            left.extend([*item.get("anyOf", []), *item.get("prefixItems", [])])
            left.extend(item[key] for key in ("items", "additionalProperties") if key in item)
    return held


def _drop_type(schema: dict[str, Any]) -> None:
    """Keep of an enumeration with a type the values of that type. One without any is refused when it is compiled."""
    if "type" in schema and ("enum" in schema or "const" in schema):
        types = schema.pop("type")
        types = types if isinstance(types, list) else [types]
        values = schema["enum"] if "enum" in schema else [schema.pop("const")]
        schema["enum"] = [value for value in values if any(_is_of(value, kind) for kind in types)]


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, PYTHON.get(kind, ())) and isinstance(value, bool) == (kind == "boolean")


def _check_keywords(source: Source, schema: dict[str, Any]) -> None:
    keys = schema.keys() - ANYWHERE
    alone = next((key for key in ALONE if key in keys), None)
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    known = {"type"}.union(*(OF_TYPE.get(kind, set()) for kind in types if isinstance(kind, str)))
    if alone is not None:
        known = {alone}
    if wrong := sorted(keys - known):
        beside = alone or " or ".join(map(str, types)) or "no type"
        raise source.refused(f"xgrammar does not hold {wrong[0]!r} beside {beside}; leave it out, or take llguidance")
    _check_reach(source, schema)
    if "pattern" in keys and keys & {"minLength", "maxLength"}:
        raise source.refused("xgrammar does not hold a length beside a pattern; leave it out, or take llguidance")
    if schema.get("properties") and schema.get("additionalProperties", False) is not False:
        rule = "xgrammar lets other properties take the names of listed ones; say additionalProperties: false"
        raise source.refused(f"{rule}, or take llguidance")


def _check_reach(source: Source, schema: dict[str, Any]) -> None:
    """Refuse references, names and patterns that xgrammar follows no further than it likes."""
    if not re.match(r"#(?:/|$)", schema.get("$ref", "#")):
        raise source.refused(f"xgrammar follows references as #/$defs/name alone, not {schema['$ref']!r:.40}")
    if unlisted := [name for name in schema.get("required", []) if name not in schema.get("properties", {})]:
        raise source.refused(f"xgrammar does not require {unlisted[0]!r:.40}, which is not in properties; list it")
    pattern = schema.get("pattern", "")
    rest = SAYABLE.sub("", pattern) or "".join(re.findall(LOOKS, pattern))
    wide = [part for part in re.findall(r"(?<!\\)\[[^\]]*\]", pattern) if _is_wide(source, part)]
    if rest or wide:
        part = (wide or [rest])[0]
        rule = "may stand for what JSON escapes, or looks further, and xgrammar does not; say which characters may come"
        raise source.refused(f"{part!r:.40} in a pattern {rule}, or take llguidance")


def _is_wide(source: Source, part: str) -> bool:
    """Whether a set has a character in it that JSON escapes."""
    try:
        return any(re.fullmatch(part, character) for character in '\x01"\\')
    except re.error as error:
        raise source.refused(f"the set {part!r:.40} in a pattern cannot be read: {error}") from None


def _checked_regex(source: Source) -> str:
    """A regular expression whose anchors are at its ends, as xgrammar drops the others."""
    check_regex(source.text)
    pieces = pieces_of(source.text)
    if re.search(LOOKS, source.text) or "\\b" in pieces or "\\B" in pieces:
        raise source.refused("xgrammar drops what looks ahead, behind or at the border of a word; leave it out")
    if "^" in pieces[1:] or "$" in pieces[:-1] or ("|" in pieces and {"^", "$"} & {*pieces}):
        raise source.refused("xgrammar drops ^ and $ that are not at the ends; leave them out: the whole text matches")
    return "".join("[^\\n]" if piece == "." else piece for piece in pieces)


def _reason(error: Exception) -> str:
    """What xgrammar says went wrong, without its place in its own sources."""
    return " ".join(re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).split())


def _library() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise MissingExtra("xgrammar", "xgrammar") from error
