"""Request and Choice: what a client asked, and each sequence that answers it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from klero.batch import Held, Seat, SequenceId, Slot
from klero.engine.guides import Guide
from klero.engine.outputs import CompletionOutput, Delta, RequestOutput
from klero.engine.scores import Growing, PromptScores, StepRows, TokenScores
from klero.engine.times import RequestClock
from klero.engine.words import Word
from klero.finish import Finish, Finished, FinishReason
from klero.params import SamplingParams


@dataclass(eq=False)
class Choice:
    """One sequence of a request: child `index` of n.

    rank: its place among all that wait or run. running: it takes part in steps; else it waits. seated: it has a seat in
    the batch, or takes one in the step that is planned; slot: which, None while there is none. num_computed: tokens
    whose K/V its blocks have; held: these blocks; sent: those of them that the batch knows. num_brought: tokens of
    which everything is done that follows a token. num_streamed: tokens that
    went out in deltas. delta_sent: the first delta, and with it the echo, is out. scores: what is said about its
    tokens; prompt_scores: about the prompt's. Both None where nothing was asked.
    """

    request: Request
    index: int
    finish: Finish
    rank: tuple[int, int] = (0, 0)
    running: bool = False
    seated: bool = False
    slot: Slot | None = None
    num_computed: int = 0
    held: Held = field(default_factory=Held)
    sent: list[int] = field(default_factory=list)
    num_brought: int = 0
    _tokens: Growing = field(default_factory=lambda: Growing(np.int32))
    num_streamed: int = 0
    delta_sent: bool = False
    finished: Finished | None = None
    scores: TokenScores | None = None
    prompt_scores: PromptScores | None = None

    @property
    def draws(self) -> bool:
        """Whether tokens follow the prompt; with max_tokens=0 it is only scored."""
        return self.request.params.max_tokens != 0

    @property
    def computes(self) -> bool:
        """Whether it takes part in steps; a prompt that is only scored is computed by the first of n choices."""
        return self.draws or self.index == 0

    @property
    def owner(self) -> str:
        """A name for messages."""
        return f"{self.request.request_id}[{self.index}]"

    @property
    def id(self) -> SequenceId:
        """Its name in the batch."""
        return self.request.request_id, self.index

    @property
    def num_prompt(self) -> int:
        """Positions of the prompt, embedded ones included."""
        return self.request.num_prompt

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.num_prompt + self.finish.num_tokens

    def token_array(self) -> npt.NDArray[np.int32]:
        """Prompt and output so far, int32 [num_tokens]; 0 for what is embedded. A view, until the next token."""
        if not len(self._tokens.values):
            self._tokens.extend(np.zeros(self.request.num_embedded, np.int32))
            self._tokens.extend(np.array(self.request.prompt_ids, np.int32))
        new = self.finish.tokens_since(len(self._tokens.values) - self.num_prompt)
        if new:
            self._tokens.extend(np.array(new, np.int32))
        return self._tokens.values

    def seat(self, end_token_ids: tuple[int, ...]) -> Seat:
        """What it brings to its slot, with what it has generated so far."""
        request = self.request
        return Seat(
            self.owner, request.params, request.prompt_ids, request.seed, self.index, self.finish,
            output_ids=self.finish.token_ids, end_token_ids=end_token_ids, bad_word_ids=request.bad_word_ids,
            num_embedded=request.num_embedded, make_matcher=request.guide and request.guide.matcher,
        )  # fmt: skip

    def output(self) -> CompletionOutput:
        """The answer, once it has finished."""
        end, finish, request = self.finished, self.finish, self.request
        assert end is not None, f"{self.owner} has not finished"
        text = request.echo + finish.text if request.params.detokenize else ""
        output = CompletionOutput(
            self.index, text, finish.token_ids, str(end.reason), end.stop_reason, request.seed, end.message,
            request.reproducible,
        )  # fmt: skip
        said = self.scores
        if said is None:
            return output
        return replace(
            output, logprobs=said.logprobs(), cumulative_logprob=said.cumulative(), generation_logits=said.logits()
        )

    def take(self, said: StepRows, rows: range) -> None:
        """Keep what a step says about the tokens that came from these of its rows, of those that were accepted."""
        if self.scores is not None:
            num_new = self.finish.num_tokens - self.scores.num
            self.scores.extend(said, rows[:num_new])

    def delta(self, token_ids: tuple[int, ...] = ()) -> Delta:
        """What is new since the last delta. token_ids: those of this step; the last may have been refused."""
        end, request = self.finished, self.request
        new = token_ids[: self.finish.num_tokens - self.num_streamed]
        text = self.finish.delta()
        if not self.delta_sent and request.params.detokenize:
            text = request.echo + text
        logprobs = None if self.scores is None else self.scores.logprobs(self.num_streamed)
        self.num_streamed, self.delta_sent = self.num_streamed + len(new), True
        reason, stop, message = (str(end.reason), end.stop_reason, end.message) if end else (None, None, None)
        return Delta(
            request.request_id, request.prompt_index, self.index, text, new, reason, stop, message, request.seed,
            request.reproducible, logprobs,
        )  # fmt: skip


@dataclass(eq=False)
class Request:
    """What a client asked. seed: resolved at admission, 0 .. 2^64-1. echo: the prompt's text, where asked for.

    reproducible: the model is deterministic. stream: every step's news goes out as deltas. prompt_index: its place in
    the call that brought it. bad_word_ids: `params.bad_words` as id sequences. prompt_embeds: float32 [E, H], positions
    before those of prompt_ids. priority: the lower goes first. guide: what its tokens are led by, where there is one.
    """

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    echo: str = ""
    reproducible: bool = False
    stream: bool = False
    prompt_index: int = 0
    bad_word_ids: tuple[Word, ...] = ()
    prompt_embeds: npt.NDArray[np.float32] | None = None
    priority: int = 0
    guide: Guide | None = None
    clock: RequestClock = field(default_factory=RequestClock)
    choices: list[Choice] = field(default_factory=list)

    @property
    def num_embedded(self) -> int:
        """Positions of the prompt that are given as embeddings."""
        return 0 if self.prompt_embeds is None else len(self.prompt_embeds)

    @cached_property
    def num_prompt(self) -> int:
        """Positions of the prompt, embedded ones included."""
        return self.num_embedded + len(self.prompt_ids)

    def output(self) -> RequestOutput:
        """The answer, once every choice has finished."""
        outputs = tuple(choice.output() for choice in self.choices)
        num_generated = sum(choice.finish.num_tokens for choice in self.choices)
        metrics = self.clock.metrics(self.choices[0].num_prompt, num_generated)
        output = RequestOutput(self.request_id, self.prompt, self.prompt_ids, outputs, metrics)
        scores = self.choices[0].prompt_scores
        if scores is None:
            return output
        context, mask = scores.context()
        return replace(output, prompt_logprobs=scores.logprobs(), context_logits=context, context_mask=mask)

    def fail(self, message: str) -> None:
        """End every choice with an error instead of its end: it keeps its tokens, and nothing is said about any."""
        for choice in self.choices:
            choice.finished = Finished(FinishReason.ERROR, None, message)
            if choice.scores is not None:
                choice.scores.forget(choice.finish.token_ids)
            if choice.prompt_scores is not None:
                choice.prompt_scores = PromptScores(self.prompt_ids, self.params, choice.prompt_scores.vocab_size)
