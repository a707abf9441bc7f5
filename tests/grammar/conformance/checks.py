"""One case of a conformance suite: a schema, an instance, and whether it is valid; and what a grammar makes of it.

An instance is checked as text without whitespace, token by token. The order of properties means nothing in JSON and
something to a grammar, so every order is tried: a valid instance passes if the grammar takes it in one of them, an
invalid one if the grammar takes it in none.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from tests.grammar.walks import BYTES, END, NUM_BYTES, reads

from klero.engine.guides import BACKENDS
from klero.errors import ParameterError
from klero.params import SamplingParams

MAX_ORDERS = 720


class Verdict(StrEnum):
    """What a grammar made of one instance."""

    RIGHT = "right"
    REFUSED = "refused"  # GrammarError: no grammar was made of the schema
    NARROW = "narrow"  # valid, and cannot be written
    WIDE = "wide"  # invalid, and can be written: wrong


class Case(NamedTuple):
    """One instance of a suite. feature: the file it comes from; schema_name, name: what the suite calls them."""

    feature: str
    schema_name: str
    schema: Any
    name: str
    instance: Any
    valid: bool


class Refused(NamedTuple):
    """Why no grammar was made of a schema."""

    rule: str


def orders(value: Any) -> Iterator[str]:
    """An instance as JSON text without whitespace, with its properties in every order."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            texts = [[f"{_text(name)}:{below}" for below in orders(value[name])] for name in names]
            yield from ("{" + ",".join(members) + "}" for members in itertools.product(*texts))
    elif isinstance(value, list):
        for items in itertools.product(*(list(orders(item)) for item in value)):
            yield "[" + ",".join(items) + "]"
    else:
        yield _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def compiled(backend: Any, schema: Any, **fields: Any) -> Any:
    """The grammar of a schema, or Refused."""
    from klero.grammar.source import source_of

    try:
        return backend.compile(source_of(SamplingParams(json=schema, **fields)))
    except ParameterError as error:
        return Refused(error.rule)


def bytes_of_text(text: str) -> list[int]:
    """A text as byte tokens."""
    return list(text.encode(errors="surrogatepass"))


class Vocabulary(NamedTuple):
    """How texts become tokens."""

    tokens: Callable[[str], Sequence[int]] = bytes_of_text
    num_tokens: int = NUM_BYTES
    end_id: int = END


IN_BYTES = Vocabulary()


def takes(grammar: Any, text: str, vocabulary: Vocabulary = IN_BYTES) -> bool:
    """Whether a grammar takes a text to its end."""
    matcher = grammar.matcher((vocabulary.end_id,))
    return reads(matcher, vocabulary.tokens(text), vocabulary.num_tokens, vocabulary.end_id)


def verdict(grammar: Any, instance: Any, valid: bool, vocabulary: Vocabulary = IN_BYTES) -> Verdict:
    """What a grammar, or Refused, makes of an instance."""
    if isinstance(grammar, Refused):
        return Verdict.REFUSED
    taken = any(takes(grammar, text, vocabulary) for text in itertools.islice(orders(instance), MAX_ORDERS))
    if taken == valid:
        return Verdict.RIGHT
    return Verdict.NARROW if valid else Verdict.WIDE


def byte_backend(name: str = "llguidance") -> Any:
    """A backend over the vocabulary of bytes; the name is that of `LLM(grammar_backend=...)`."""
    return getattr(importlib.import_module(f"klero.grammar.{name}"), BACKENDS[name])(BYTES, NUM_BYTES)


def smollm2_backend() -> tuple[Any, Vocabulary]:
    """The backend over the vocabulary of SmolLM2, and that vocabulary."""
    from transformers import AutoTokenizer

    from klero.engine.models.smollm2 import converted_directory
    from klero.finish import TokenBytes
    from klero.grammar.llguidance import LLGuidance

    tokenizer = AutoTokenizer.from_pretrained(converted_directory())
    num_tokens = len(tokenizer)

    def tokens(text: str) -> Sequence[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    vocabulary = Vocabulary(tokens, num_tokens, tokenizer.eos_token_id)
    return LLGuidance(TokenBytes(tokenizer), num_tokens), vocabulary
