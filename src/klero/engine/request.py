"""Request and Choice: what a client asked, and each sequence that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from klero.batch import Slot
from klero.engine.outputs import CompletionOutput, Delta, RequestOutput
from klero.engine.scores import PromptScores, StepRows, TokenScores
from klero.engine.times import RequestClock
from klero.engine.words import Encode, Word, bad_word_ids
from klero.errors import Fault, ParameterError, RequestError
from klero.finish import Finish, Finished, TokenBytes, text_of_prompt
from klero.params import SamplingParams
from klero.params.checks import Broken, as_integer
from klero.params.together import nothing_allowed
from klero.params.width import check_width


@dataclass(eq=False)
class Choice:
    """One sequence of a request: child `index` of n.

    arrival: its place in the order of arrival. running: it takes part in steps; else it waits. slot: None until it
    has been seated. num_computed: tokens whose K/V is cached; 0 again after a preemption. num_streamed: tokens that
    went out in deltas. delta_sent: the first delta, and with it the echo, is out. scores: what is said about its
    tokens; prompt_scores: about the prompt's. Both None where nothing was asked.
    """

    request: Request
    index: int
    finish: Finish
    arrival: int = 0
    running: bool = False
    slot: Slot | None = None
    num_computed: int = 0
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
    def owner(self) -> str:
        """A name for messages."""
        return f"{self.request.request_id}[{self.index}]"

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.prompt_ids) + self.finish.num_tokens

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
    the call that brought it. bad_word_ids: `params.bad_words` as id sequences.
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
    clock: RequestClock = field(default_factory=RequestClock)
    choices: list[Choice] = field(default_factory=list)

    def output(self) -> RequestOutput:
        """The answer, once every choice has finished."""
        outputs = tuple(choice.output() for choice in self.choices)
        num_generated = sum(choice.finish.num_tokens for choice in self.choices)
        metrics = self.clock.metrics(len(self.prompt_ids), num_generated)
        output = RequestOutput(self.request_id, self.prompt, self.prompt_ids, outputs, metrics)
        scores = self.choices[0].prompt_scores
        if scores is None:
            return output
        context, mask = scores.context()
        return replace(output, prompt_logprobs=scores.logprobs(), context_logits=context, context_mask=mask)


@dataclass(frozen=True)
class Limits:
    """What bounds a request here. vocab_size: width of the logits, and num_scored of it, the first, are no padding.
    capacity: tokens that all KV blocks hold, None where the model needs no blocks.
    """

    vocab_size: int
    num_scored: int
    max_model_len: int
    capacity: int | None
    end_token_ids: tuple[int, ...]


def admit(
    request_id: str,
    prompt: str | None,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    vocabulary: TokenBytes | None,
    encode: Encode | None = None,
) -> Request:
    """Check a request against the model and make it. Raises RequestError or ParameterError; nothing enters a batch.

    encode: text to ids without special tokens, for bad_words.
    """
    if params.truncate_prompt_tokens is not None:
        prompt_ids = prompt_ids[-params.truncate_prompt_tokens :]
    ids = _checked_prompt(request_id, prompt_ids, limits)
    check_width(params, limits.vocab_size, limits.num_scored)
    _check_scored(request_id, ids, params, limits)
    words = bad_word_ids(params.bad_words, encode, limits.vocab_size)
    if fault := nothing_allowed(params, words):
        raise ParameterError([fault])
    max_tokens = _room(request_id, len(ids), params, limits)
    echo = text_of_prompt(vocabulary, params, ids) if vocabulary is not None and params.echo else ""
    request = Request(request_id, prompt, ids, params, echo=echo, bad_word_ids=words)
    for index in range(params.n):
        finish = Finish(
            params, end_token_ids=limits.end_token_ids, prompt_ids=ids, vocabulary=vocabulary,
            max_tokens=max(1, max_tokens),  # one that only scores is given no token
        )  # fmt: skip
        request.choices.append(Choice(request, index, finish))
        if params.asks or params.return_generation_logits:
            request.choices[-1].scores = TokenScores(params, limits.vocab_size)
    if params.scores_prompt:
        request.choices[0].prompt_scores = PromptScores(ids, params, limits.vocab_size)
    return request


def _checked_prompt(request_id: str, prompt_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    if len(prompt_ids) == 0:
        raise RequestError(f"{request_id}: the prompt is empty; give at least one token (such as the model's bos)")
    bad = [i for i in prompt_ids if not _is_id(i, limits.vocab_size)]
    if bad:
        raise RequestError(
            f"{request_id}: prompt token id {bad[0]!r}: must be an integer in [0, {limits.vocab_size - 1}], "
            "the width of the model's logits"
        )
    return tuple(int(i) for i in prompt_ids)


def _check_scored(request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, limits: Limits) -> None:
    """Refuse to score a prompt token whose column is padding, which nobody reads."""
    num = limits.num_scored
    if params.prompt_logprobs is not None and max(prompt_ids) >= num:
        raise RequestError(
            f"{request_id}: prompt token id {max(prompt_ids)}: the columns of the logits from {num} on are padding, so "
            "it has no logprob; leave out prompt_logprobs"
        )


def _is_id(value: Any, vocab_size: int) -> bool:
    """Whether a value is an integer, no bool among them, inside the logits."""
    try:
        return 0 <= as_integer(value, "") < vocab_size
    except Broken:
        return False


def _room(request_id: str, num_prompt: int, params: SamplingParams, limits: Limits) -> int:
    """The resolved max_tokens: what was asked, or what fits."""
    most = limits.max_model_len
    what = f"the model's context is {most}"
    if limits.capacity is not None and limits.capacity < most:
        most = limits.capacity
        what = f"all KV blocks together hold {most} (raise num_blocks)"
    room = most - num_prompt
    if room < (params.max_tokens != 0):
        fits = "so no token can follow" if params.max_tokens != 0 else "so it does not fit"
        raise RequestError(
            f"{request_id}: the prompt has {num_prompt} tokens and {what}, {fits}; "
            "shorten it, or set truncate_prompt_tokens"
        )
    if params.max_tokens is not None and params.max_tokens > room:
        asked = num_prompt + params.max_tokens
        rule = f"{num_prompt} prompt tokens + max_tokens are {asked} and {what}; at most {room} fit"
        raise ParameterError([Fault("max_tokens", params.max_tokens, rule)])
    return room if params.max_tokens is None else params.max_tokens
