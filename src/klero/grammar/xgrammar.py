"""Grammars compiled and followed by xgrammar, behind the same protocol. Optional: the extra `xgrammar`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import GrammarError, MissingExtra
from klero.grammar.ends import EndedMatcher, bytes_of_tokens
from klero.grammar.gbnf import is_gbnf
from klero.grammar.lark import refused
from klero.grammar.protocol import Matcher, TokenText
from klero.grammar.schema import held_schema
from klero.grammar.source import Source

I32 = npt.NDArray[np.int32]

MAX_CACHE_BYTES = 2**28


class XGrammar:
    """Compile grammars, and fill masks of num_tokens ids on num_threads threads.

    text: the bytes of the ids below num_tokens. Special tokens match no text, ids without text are never allowed. It
    takes no Lark grammars and refuses the keywords of schemas that it would not hold. Unlike llguidance it has no
    measure of work, so that a grammar can take long to compile. MissingExtra without xgrammar.
    """

    def __init__(self, text: TokenText, num_tokens: int, num_threads: int = 1) -> None:
        self.num_tokens = num_tokens
        self._library = _library()
        tokens, special = bytes_of_tokens(text, num_tokens)
        for token_id in special:
            tokens[token_id] = b""
        information = self._library.TokenizerInfo(
            tokens, self._library.VocabType.RAW, vocab_size=num_tokens + 1, stop_token_ids=[num_tokens]
        )
        self._compiler = self._library.GrammarCompiler(
            information, max_threads=num_threads, cache_limit_bytes=MAX_CACHE_BYTES
        )

    def compile(self, source: Source) -> XGrammarGrammar:
        """Compile a grammar; GrammarError if it cannot be."""
        raise refused(source, "is not built yet")


class XGrammarGrammar:
    pass


def _library() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise MissingExtra("xgrammar", "xgrammar") from error
