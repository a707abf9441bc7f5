"""What comes back: names as vLLM's users know them, plus the seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from klero.finish import StopReason
from klero.logprobs import Logprobs


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. index: which of n. finish_reason: "stop", "length", "error" or "abort".

    stop_reason: what the caller asked to stop at (id, id sequence or string), None for the model's end and all else.
    seed: the seed it was drawn with, 0 .. 2^64-1; with the same prompt, parameters and index it draws the same lots.
    error: the message of an error or an abort, else None. reproducible: the same request gives the same tokens in any
    company, because the model is deterministic; with False the lots are the same and the logits may differ.

    logprobs: one entry for each of token_ids, the end included, however it ended; cumulative_logprob: their sum;
    generation_logits: float32 [n, V], the model's own row of each, before anything was done to it. All three None where
    not asked for. Two are equal when the rest is: arrays do not take part.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: StopReason
    seed: int
    error: str | None = None
    reproducible: bool = False
    logprobs: Logprobs | None = field(default=None, compare=False)
    cumulative_logprob: float | None = field(default=None, compare=False)
    generation_logits: npt.NDArray[np.float32] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RequestMetrics:
    """What a request cost, up to its end, however it ended. Seconds by the monotonic clock, since it was asked.

    seconds_queued: until it first ran. seconds_to_first_token: until the first token of any choice; both None if that
    never came. num_generated_tokens: of all choices. num_prompt_tokens_computed: prompt tokens that the model computed,
    once for each choice, and again after each preemption; what was cached, or computed by a sibling, is not among them.
    num_cached_tokens: prompt tokens of the first choice that were cached. num_steps: steps that computed tokens of it.
    """

    seconds_queued: float | None
    seconds_to_first_token: float | None
    seconds_total: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prompt_tokens_computed: int
    num_steps: int
    num_preemptions: int
    num_cached_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. prompt: the text given, None for ids; prompt_token_ids: as fed to the model.

    prompt_logprobs: one entry for each of prompt_token_ids; of the first nothing is said (NaN, rank 0), as no row comes
    before it. context_logits: float32 [num_prompt, V], row i the model's own after prompt token i. context_mask: bool
    [num_prompt], which of these were computed; all, unless the request was ended before; the others are NaN, and their
    tokens have no logprob. None where not asked for. Choice 0 of n computes them.

    Two are equal when they say the same, whatever it cost; arrays do not take part.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics = field(compare=False)
    finished: bool = True
    prompt_logprobs: Logprobs | None = field(default=None, compare=False)
    context_logits: npt.NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    context_mask: npt.NDArray[np.bool_] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step brought one choice. Put together, the deltas of a choice are its text, tokens, logprobs and end.

    prompt_index: which prompt of the call. index: which of n. text: what can be shown now and is never taken back:
    whole characters, nothing that may still become a stop string; with echo the first begins with the prompt's text.
    token_ids: the new ones, whether or not their text is out. finish_reason: None until the choice's last delta;
    stop_reason, error: as there. seed, reproducible: in every delta. logprobs: one entry for each of token_ids; None
    where not asked for.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: StopReason
    error: str | None
    seed: int
    reproducible: bool
    logprobs: Logprobs | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Progress:
    """Where a `generate` stands after a step: requests done, in all, tokens generated; ids of those unfinished."""

    done: int
    total: int
    num_tokens: int
    unfinished: tuple[str, ...] = ()
