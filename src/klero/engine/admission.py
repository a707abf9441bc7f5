"""Admission: a request is checked against the model and the engine's limits before anything enters a batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch import Held, KVAccount, identity_of
from klero.engine.embeds import checked_embeds
from klero.engine.guides import Guides
from klero.engine.models.protocol import Model
from klero.engine.options import EngineOptions
from klero.engine.request import Choice, Request
from klero.engine.scores import PromptScores, TokenScores
from klero.engine.words import Encode, bad_word_ids
from klero.errors import Fault, ParameterError, QueueFullError, RequestError
from klero.finish import Finish, TokenBytes, text_of_prompt
from klero.grammar.protocol import Compiled
from klero.logprobs.asks import EVERY_TOKEN
from klero.params import SamplingParams
from klero.params.checks import Broken, as_integer
from klero.params.together import nothing_allowed
from klero.params.width import check_width

ENTRY = 8  # bytes of one in a list of logprobs: an int32 and a float32


@dataclass(frozen=True)
class Limits:
    """What bounds a request here. vocab_size: width of the logits, and num_scored of it, the first, are no padding.
    capacity: tokens that all KV blocks hold, None where the model needs no blocks. max_answer_bytes: of the rows of
    logits and the lists of logprobs that come back. takes_priority: whether one may have another priority than 0.
    """

    vocab_size: int
    num_scored: int
    max_model_len: int
    capacity: int | None
    end_token_ids: tuple[int, ...]
    max_answer_bytes: int
    takes_priority: bool = False


def limits_of(
    model: Model, options: EngineOptions, num_scored: int, max_model_len: int, kv: KVAccount | None
) -> Limits:
    """The limits of an engine."""
    end_ids = tuple(i for i in model.end_token_ids if 0 <= i < model.vocab_size)  # others can never be drawn
    capacity = None if kv is None else kv.blocks.num_blocks * kv.blocks.block_size
    return Limits(
        model.vocab_size, num_scored, max_model_len, capacity, end_ids, options.max_answer_bytes,
        takes_priority=options.scheduling_policy == "priority",
    )  # fmt: skip


class NewRequest(NamedTuple):
    """A request as it was asked, before anything is checked."""

    request_id: str
    prompt: str | None
    prompt_ids: Sequence[int]
    params: SamplingParams
    prompt_embeds: Any = None
    cache_salt: str | None = None
    priority: int = 0
    compiled: Future[Compiled] | None = None


def check_queue(request_id: str, params: SamplingParams, num_waiting: int, most: int | None) -> None:
    """Refuse a request whose choices may not wait any more: QueueFullError, or RequestError if they never may."""
    brings = params.n if params.max_tokens != 0 else 1
    if most is None or num_waiting + brings <= most:
        return
    if brings > most:
        raise RequestError(f"{request_id}: n={brings} choices never fit into max_num_waiting={most}")
    raise QueueFullError(
        f"{request_id}: {num_waiting} choices wait, this request brings {brings}, and max_num_waiting={most}; "
        "try again when some have started"
    )


def admit(
    asked: NewRequest,
    limits: Limits,
    guides: Guides,
    vocabulary: TokenBytes | None,
    encode: Encode | None = None,
    width: int | None = None,
) -> Request:
    """Check a request against the model and make it. Raises RequestError or ParameterError; nothing enters a batch.

    guides: compile its grammar, unless that was prepared. encode: text to ids without special tokens, for bad_words.
    width: of embeddings; None: the model takes ids only.
    """
    request_id, params = asked.request_id, asked.params
    embeds = checked_embeds(request_id, asked.prompt_embeds, params, width)
    ids, embeds = _truncated(asked.prompt_ids, embeds, params.truncate_prompt_tokens)
    ids = _checked_prompt(request_id, ids, limits, embedded=embeds is not None)
    num_prompt = len(ids) + (0 if embeds is None else len(embeds))
    check_width(params, limits.vocab_size, limits.num_scored)
    _check_scored(request_id, ids, params, limits)
    words = bad_word_ids(params.bad_words, encode, limits.vocab_size)
    if fault := nothing_allowed(params, words):
        raise ParameterError([fault])
    max_tokens = _room(request_id, num_prompt, params, limits)
    if fault := fault_of_bytes(answer_bytes(num_prompt, max_tokens, params, limits), params, limits.max_answer_bytes):
        raise ParameterError([fault])
    echo = text_of_prompt(vocabulary, params, ids) if vocabulary is not None and params.echo else ""
    request = Request(
        request_id, asked.prompt, ids, params, echo=echo, bad_word_ids=words, prompt_embeds=embeds,
        priority=_checked_priority(request_id, asked.priority, limits),
        guide=guides.guide_of(params, ids, asked.compiled),
    )  # fmt: skip
    identity = identity_of(salt=_checked_salt(request_id, asked.cache_salt), embeds=embeds)
    for index in range(params.n):
        finish = Finish(
            params, end_token_ids=limits.end_token_ids, prompt_ids=ids, vocabulary=vocabulary,
            max_tokens=max(1, max_tokens),  # one that only scores is given no token
        )  # fmt: skip
        request.choices.append(_choice(request, index, finish, identity, limits))
    return request


def _choice(request: Request, index: int, finish: Finish, identity: bytes, limits: Limits) -> Choice:
    """Child `index` of a request, with room for what is said about it; of the prompt the first says it."""
    choice, params = Choice(request, index, finish, held=Held(identity=identity)), request.params
    if params.asks or params.return_generation_logits:
        choice.scores = TokenScores(params, limits.vocab_size)
    if params.scores_prompt and index == 0:
        choice.prompt_scores = PromptScores(request.prompt_ids, params, limits.vocab_size)
    return choice


def _truncated(
    ids: Sequence[int], embeds: npt.NDArray[np.float32] | None, most: int | None
) -> tuple[Sequence[int], npt.NDArray[np.float32] | None]:
    """The last `most` positions of a prompt."""
    if most is None:
        return ids, embeds
    if embeds is not None:
        left = max(0, most - len(ids))
        embeds = embeds[-left:] if left else None
    return ids[-most:], embeds


def _checked_priority(request_id: str, priority: Any, limits: Limits) -> int:
    try:
        number = as_integer(priority, "must be an integer; the lower goes first")
    except Broken as error:
        raise RequestError(f"{request_id}: priority={priority!r}: {error}") from None
    if number and not limits.takes_priority:
        raise RequestError(f"{request_id}: priority={number}: scheduling_policy is 'fcfs'; make it 'priority'")
    return number


def _checked_salt(request_id: str, salt: Any) -> str | None:
    if not isinstance(salt, str | None):
        raise RequestError(f"{request_id}: cache_salt={salt!r}: must be a text, one for the whole call")
    return salt


def _checked_prompt(
    request_id: str, prompt_ids: Sequence[int], limits: Limits, *, embedded: bool
) -> tuple[int, ...]:
    if len(prompt_ids) == 0 and not embedded:
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


def answer_bytes(num_prompt: int, max_tokens: int, params: SamplingParams, limits: Limits) -> dict[str, int]:
    """How many bytes the arrays of an answer take at most, by the field that asks for them.

    Not counted: a few numbers for each token, and kept sets, whose sizes nobody knows before they are drawn from.
    """
    num_new, row, entry = params.n * max_tokens, 4 * limits.vocab_size, ENTRY

    def top(asked: int | None) -> int:
        return limits.num_scored if asked == EVERY_TOKEN else asked or 0

    return {
        "prompt_logprobs": num_prompt * entry * top(params.prompt_logprobs),
        "return_context_logits": num_prompt * row * params.return_context_logits,
        "logprobs": num_new * entry * top(params.logprobs),
        "logprob_token_ids": num_new * entry * len(params.logprob_token_ids),
        "return_generation_logits": num_new * row * params.return_generation_logits,
    }


def fault_of_bytes(asked: dict[str, int], params: SamplingParams, most: int) -> Fault | None:
    """What is wrong with arrays of so many bytes, by field, if they are more than `most`: told of the largest."""
    total, field = sum(asked.values()), max(asked, key=lambda name: asked[name])
    if total > most:
        way = "shorten the prompt" if field in ("prompt_logprobs", "return_context_logits") else "lower max_tokens or n"
        rule = (
            f"the answer may take {total} bytes, {asked[field]} of them for this, and max_answer_bytes is "
            f"{most}; ask for less, {way}, or raise max_answer_bytes where the LLM is made"
        )
        return Fault(field, getattr(params, field), rule)
    return None
