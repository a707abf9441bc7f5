"""Guides: what leads the tokens of a request, a grammar, a budget of thinking, or both."""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from typing import Any, NamedTuple

from klero.device import num_threads
from klero.errors import STOPS, Fault, GrammarError, KleroError, ParameterError, told
from klero.finish import TokenBytes
from klero.grammar.grammars import Grammars
from klero.grammar.protocol import Backend, Compiled, Matcher
from klero.grammar.source import Source, source_of
from klero.grammar.thinking import Marks, Thinking
from klero.params import SamplingParams

BACKENDS = {"llguidance": "LLGuidance", "xgrammar": "XGrammar"}  # modules of klero.grammar, and the class in each


class Guide(NamedTuple):
    """What one request is led by. compiled: its grammar; marks: of the model's thinking. None: there is none.

    end_ids: what ends the request; turn_end_ids: the model's own, which end turns in a prompt.
    """

    compiled: Compiled | None
    end_ids: tuple[int, ...]
    marks: Marks | None
    budget: int | None
    prompt_ids: tuple[int, ...]
    num_tokens: int
    turn_end_ids: tuple[int, ...]

    def matcher(self) -> Matcher:
        """A matcher for one sequence, at its start."""
        inner = None if self.compiled is None else self.compiled.matcher(self.end_ids)
        if self.compiled is not None and not all(hasattr(inner, name) for name in ("fill", "accept", "rewind")):
            raise TypeError(f"{type(inner).__name__} has not the methods fill, accept and rewind")
        if self.marks is not None:
            return Thinking(
                self.marks, self.budget, inner, self.prompt_ids, self.num_tokens, self.end_ids, self.turn_end_ids
            )
        assert inner is not None
        return inner


class Guides:
    """The guides of an engine's requests. Any thread may ask.

    backend: a name of BACKENDS, or a `klero.grammar.Backend`. vocabulary: the bytes of tokens; None: there is no text.
    num_tokens: columns of the logits that are no padding. marks: where the model's thinking begins and ends.
    """

    def __init__(
        self, backend: Any, vocabulary: TokenBytes | None, num_tokens: int, marks: Marks | None,
        end_token_ids: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._marks, self._num_tokens, self._end_token_ids = marks, num_tokens, end_token_ids
        self._has_text = vocabulary is not None or not isinstance(backend, str)

        def make() -> Backend:
            made: Backend = backend
            if isinstance(backend, str):
                module = importlib.import_module(f"klero.grammar.{backend}")
                made = getattr(module, BACKENDS[backend])(vocabulary, num_tokens, num_threads())
            return made

        self.grammars = Grammars(make)

    def prepare(self, params: SamplingParams) -> Future[Compiled] | None:
        """Begin to compile what a request will need; None: nothing is to be compiled."""
        source = source_of(params)
        return None if source is None or not self._has_text else self.grammars.prepare(source)

    def warm(self) -> None:
        """Read the vocabulary in the background, which the first grammar would wait for, and every step beside it."""
        if self._has_text:
            self.grammars.prepare(Source("json_object"))

    def guide_of(
        self, params: SamplingParams, prompt_ids: tuple[int, ...], compiled: Future[Compiled] | None = None
    ) -> Guide | None:
        """What leads a request; None: nothing. compiled: as `prepare` gave it, not waited for; None: waited for here.

        Raises GrammarError or ParameterError.
        """
        source, budget = source_of(params), params.thinking_token_budget
        if source is None and budget is None:
            return None
        if budget is not None and self._marks is None:
            rule = (
                "needs the marks of thinking, and the model's template has none; give LLM(thinking_token_ids=...), or "
                "--thinking-token-ids"
            )
            raise ParameterError([Fault("thinking_token_budget", budget, rule)])
        if source is not None and not self._has_text:
            raise GrammarError([Fault(source.kind, source.text, "is about text; give LLM(tokenizer=...)")])
        end_ids = tuple(dict.fromkeys(params.end_token_ids + (() if params.ignore_eos else self._end_token_ids)))
        if source is not None and not any(i < self._num_tokens for i in end_ids):
            rule = "ends with an end id, and this model has none; give end_token_ids"
            raise GrammarError([Fault(source.kind, source.text, rule)])
        grammar = None if source is None else self.grammars.compiled(source, compiled)
        guide = Guide(grammar, end_ids, self._marks, budget, prompt_ids, self._num_tokens, self._end_token_ids)
        try:
            guide.matcher()  # what is wrong with it is said before it enters a batch
        except (*STOPS, KleroError):
            raise
        except Exception as error:  # of a backend of somebody's own
            field = "thinking_token_budget" if source is None else source.kind
            raise GrammarError([Fault(field, getattr(params, field), f"has no matcher: {told(error)}")]) from error
        return guide
