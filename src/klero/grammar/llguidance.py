"""Grammars compiled and followed by llguidance: an Earley parser over lexemes that are derivatives of regexes."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.errors import GrammarError, MissingExtra
from klero.grammar.deep import on_large_stack, start_threads
from klero.grammar.ends import EndedMatcher, bytes_of_tokens
from klero.grammar.lark import lark_of
from klero.grammar.protocol import Matcher, TokenText
from klero.grammar.source import Source

I32 = npt.NDArray[np.int32]

MAX_REASON = 300


AMBIGUOUS = "Current row has"
"""In what llguidance says of a text that can be read in too many ways."""


class Limits(NamedTuple):
    """What a grammar may cost, in llguidance's own measures.

    start_fuel, step_fuel: work of the lexer while a grammar is compiled and while one mask is made, 50 and 14 units a
    microsecond. lexer_states: what a lexer remembers, 1 to 2 KiB each. size: symbols of a grammar. step_items: items
    of the parser for one mask. row_items: the same for one byte, which bounds how ambiguous a text may be; a grammar
    that a user wrote can make them grow with every token, a schema cannot.
    """

    start_fuel: int = 500_000
    step_fuel: int = 200_000
    lexer_states: int = 20_000
    size: int = 250_000
    step_items: int = 50_000
    row_items: int = 10_000
    row_items_of_grammar: int = 500


class LLGuidance:
    """Compile grammars, and fill masks of num_tokens ids on num_threads threads.

    text: the bytes of the ids below num_tokens. Special tokens match no text, and are allowed only where a Lark
    grammar names them; ids without text are never allowed. A grammar beyond the limits is a GrammarError, when it is
    compiled or at the token where it gets there. MissingExtra without llguidance.
    """

    def __init__(self, text: TokenText, num_tokens: int, num_threads: int = 1, *, limits: Limits | None = None) -> None:
        self.num_tokens = num_tokens
        self._library = _library()
        tokens, special = bytes_of_tokens(text, num_tokens)
        self._has_text = [bool(data) for data in tokens]
        wrapped = self._library.TokenizerWrapper(_Tokens(tokens, special))
        self._tokenizer = self._library.LLTokenizer(wrapped)
        self._limits = Limits() if limits is None else limits
        self._executor = self._library.LLExecutor(num_threads)
        start_threads()

    def compile(self, source: Source) -> LLGrammar:
        """Compile a grammar and make its first mask; GrammarError if it cannot be, or allows no text."""
        grammar = json.dumps({"grammars": [{"lark_grammar": lark_of(source)}]})
        return LLGrammar(self, source, grammar)

    def fill_all(self, matchers: Sequence[Matcher], masks: I32) -> list[GrammarError | None]:
        """Write matcher r's mask into row r; its error and a row of zeros where it has none."""
        errors: list[GrammarError | None] = [None] * len(matchers)
        running = {r: m for r, m in enumerate(matchers) if isinstance(m, LLMatcher) and m.is_running(self)}
        may_end = self._fill_running(running, masks) if running else []
        for r, matcher in enumerate(matchers):
            try:
                if r in running and not running[r].inner.is_error():
                    running[r].put_ends(masks[r], may_end[r])
                else:
                    matcher.fill(masks[r])
            except GrammarError as error:
                errors[r] = error
                masks[r] = 0
        return errors

    def _fill_running(self, running: dict[int, LLMatcher], masks: I32) -> list[bool]:
        """Write these rows, all but their end ids, and return for every row whether the text may end there."""
        words = np.empty((len(masks), self.num_words), np.int32)
        pairs = [(matcher.inner, r) for r, matcher in running.items()]
        self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, self.num_words * 4, len(words))
        word, bit = self.num_tokens >> 5, self.num_tokens & 31
        masks[:] = words[:, : masks.shape[1]]
        if bit:
            masks[:, word] &= (1 << bit) - 1
        return [bool(flag) for flag in (words[:, word] >> bit & 1).tolist()]

    @property
    def num_words(self) -> int:
        """Words of a mask as llguidance makes it, which has one more token, the end."""
        return self.num_tokens // 32 + 1

    def started(self, source: Source, grammar: str) -> Any:
        """A matcher of llguidance's own, at the beginning; GrammarError for a grammar that it does not take.

        On a large stack: llguidance follows references by recursion, and a process that runs out of stack dies.
        """
        limits = self._limits_of(source)
        made = on_large_stack(lambda: self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits))
        if made.is_error():
            raise source.refused(f"is not a grammar that can be followed: {_reason(made)}")
        if warnings := made.get_grammar_warnings():
            raise source.refused(f"is not held in full: {'; '.join(warnings)}")
        return made

    def _limits_of(self, source: Source) -> Any:
        asked = self._limits
        row_items = asked.row_items_of_grammar if source.kind == "grammar" else asked.row_items
        return self._library.LLParserLimits(
            max_items_in_row=row_items,
            initial_lexer_fuel=asked.start_fuel,
            step_lexer_fuel=asked.step_fuel,
            step_max_items=asked.step_items,
            max_lexer_states=asked.lexer_states,
            max_grammar_size=asked.size,
            verbose_errors=False,
        )

    def has_text(self, token_id: int) -> bool:
        """Whether an id has text, or a name. llguidance takes one without anywhere, as it changes nothing."""
        return self._has_text[token_id]


class LLGrammar:
    """A compiled grammar, and its lexer: what it remembers is shared by all matchers that begin from it.

    It decides how long a mask takes, and what ends a lexer for one ends it for all. So lexers are numbered, and
    matchers whose lexer has failed begin anew with the next, which is one for all of them.
    """

    def __init__(self, backend: LLGuidance, source: Source, grammar: str) -> None:
        self._backend, self._source, self._grammar = backend, source, grammar
        self._lock = threading.Lock()
        self._first, self._lexer = backend.started(source, grammar), 0
        self._has_failed = False
        self._check()

    def matcher(self, end_ids: tuple[int, ...]) -> LLMatcher:
        """Make a matcher at the beginning of the text; end_ids: the tokens that end it."""
        return LLMatcher(self._backend, self, end_ids)

    def start(self, after: int = -1) -> tuple[Any, int, bool]:
        """A matcher of llguidance's own, the number of its lexer, and whether this lexer is new.

        after: a number that is too low. No lexer that has failed is given away.
        """
        with self._lock:
            is_new = self._has_failed or self._lexer <= after
            if is_new:
                self._first = self._backend.started(self._source, self._grammar)
                self._lexer, self._has_failed = self._lexer + 1, False
            return self._first.deep_copy(), self._lexer, is_new

    def start_alone(self) -> Any:
        """The same with a lexer that nobody else has."""
        return self._backend.started(self._source, self._grammar)

    def lexer_failed(self, lexer: int) -> None:
        """Let nobody start with this lexer any more."""
        with self._lock:
            self._has_failed |= lexer == self._lexer

    def failed(self, inner: Any) -> GrammarError:
        """The error of a matcher of llguidance's own that is in the state of error."""
        return self._source.refused(f"cannot be followed here: {_reason(inner)}")

    def _check(self) -> None:
        """Raise unless a text may begin, and its first token can be taken back."""
        words = np.empty(self._backend.num_words, np.int32)
        first, _, _ = self.start()
        first.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if not first.is_error() and not first.is_stopped():
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            token_id = int(bits.argmax())
            if token_id < self._backend.num_tokens:
                first.consume_token(token_id)
                first.rollback(1)
        if first.is_error():
            raise self._source.refused(f"is not a grammar that can be followed: {_reason(first)}")


class LLMatcher(EndedMatcher):
    """What one sequence may still say."""

    def __init__(self, backend: LLGuidance, grammar: LLGrammar, end_ids: tuple[int, ...]) -> None:
        super().__init__(backend.num_tokens, end_ids)
        self.batch = backend
        self._grammar = grammar
        self.inner, self._lexer, _ = grammar.start()

    def is_running(self, backend: LLGuidance) -> bool:
        """Whether a backend makes this matcher's next mask: the text has not ended, and nothing is wrong."""
        return self.batch is backend and not self.has_ended and not self.inner.is_error()

    def _make_mask(self) -> I32:
        made = np.empty(self.batch.num_words, np.int32)
        self._ask(lambda: self.inner.unsafe_compute_mask_ptr(made.ctypes.data, made.nbytes))
        return made

    def _take(self, token_id: int) -> bool:
        if not self.batch.has_text(token_id):
            return False
        if self._ask(lambda: self.inner.try_consume_tokens([token_id])):
            return True
        before = self.inner  # a lexer at its limit refuses without a word, and says so when it is asked for a mask
        self._make_mask()
        return self.inner is not before and bool(self._ask(lambda: self.inner.try_consume_tokens([token_id])))

    def _may_end(self) -> bool:
        return bool(self._ask(lambda: self.inner.is_accepting()))

    def _take_back(self, num_tokens: int) -> None:
        if not self.inner.is_error():
            self.inner.rollback(num_tokens)
        if self.inner.is_error():
            self._begin_anew(lambda: None)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Ask llguidance; GrammarError where it fails with a lexer that has seen this text only.

        What a lexer may remember is limited, and so is the work for what it does not remember yet. Others fill it, and
        spare it work, so a failure with a lexer that is shared says nothing about this text. A text that is too
        ambiguous is so with any lexer, and following it again would take as long as all of it took.
        """
        if not self.inner.is_error():
            answer = question()
            if not self.inner.is_error():
                return answer
        if AMBIGUOUS in self.inner.get_error():
            raise self._grammar.failed(self.inner)
        return self._begin_anew(question)

    def _begin_anew(self, question: Callable[[], Any]) -> Any:
        """Follow the text again with the next lexer, then with one alone; the first answer that is not a failure."""
        self._grammar.lexer_failed(self._lexer)
        self.inner, self._lexer, is_new = self._grammar.start(after=self._lexer)
        if self._taken:
            self.inner.consume_tokens(self._taken)
        answer = None if self.inner.is_error() else question()
        if self.inner.is_error():
            self._grammar.lexer_failed(self._lexer)
            if self._taken or not is_new:
                self.inner = self._grammar.start_alone()
                answer = self._retrace(question)
        if self.inner.is_error():
            raise self._grammar.failed(self.inner)
        return answer

    def _retrace(self, question: Callable[[], Any]) -> Any:
        """The answer after the text, with the work spread over its tokens as it is when they are generated: there is
        a limit for each step. None where something fails, and the matcher is in the state of error."""
        made = np.empty(self.batch.num_words, np.int32)
        for token_id in self._taken:
            self.inner.unsafe_compute_mask_ptr(made.ctypes.data, made.nbytes)
            if not self.inner.is_error():
                self.inner.consume_token(token_id)
            if self.inner.is_error():
                return None
        return question()


class _Tokens:
    """A vocabulary as llguidance takes it, with one id more: the end, which has no text."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)
        self.special_token_ids = special

    def __call__(self, text: bytes) -> list[int]:
        """No ids: llguidance asks for those of a text that it would force, and forces none here."""
        return []


def _reason(inner: Any) -> str:
    """What llguidance says went wrong, in one line, without the lines of the grammar that it shows."""
    said = re.split(r"\n\s*\d+ \| |<non-verbose/>", inner.get_error())[0]
    said = re.sub(r'invalid regex ".*" \(in ', "invalid regex (in ", said, flags=re.DOTALL)
    said = re.sub(r"regex parse error:.*\nerror: ", "", said, flags=re.DOTALL)
    said = " ".join(said.split())
    said = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: | Enable 'coerce_one_of'.*", "", said)
    return said if len(said) <= MAX_REASON else f"{said[:MAX_REASON]}..."


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingExtra("engine", "llguidance") from error
