"""Prompts as the model gets them: texts and conversations as token ids, and whether they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from klero.engine import chat as chats
from klero.errors import Fault, ModelError, RequestError
from klero.finish import TextStream, TokenBytes
from klero.params import SamplingParams
from klero.server.schemas import Message

if TYPE_CHECKING:
    from klero.engine import LLM
    from klero.engine.admission import Limits

LONG_TEXT = 2**16  # characters
ROLES = ("system", "developer", "user", "assistant", "tool")
ARGUMENTS = ("tools", "chat_template_kwargs", "messages")
_LONGEST: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def as_ids(prompt: str | list[int], llm: LLM, *, whole: bool = False) -> list[int]:
    """The token ids of a prompt. RequestError for a text that cannot be read.

    whole: all of it must fit. What is far too long is refused unread then, as reading it may take ten seconds.
    """
    if not isinstance(prompt, str):
        return prompt
    if whole and len(prompt) > LONG_TEXT and (longest := _longest_token(llm)):
        least, (most, what) = len(prompt.encode()) // longest, context_of(llm.engine.limits)
        if least >= most:
            raise RequestError(f"{len(prompt)} characters are more than {least} tokens, and {what}; shorten it")
    return list(llm.tokenize(prompt))


def _longest_token(llm: LLM) -> int:
    """Bytes of text that a token stands for at most; 0: nobody knows, as the tokenizer changes text before it reads it.

    A tokenizer of bytes without a normalizer leaves nothing out, and its vocabulary has a character for each byte.
    """
    if llm not in _LONGEST:
        backend = getattr(llm.tokenizer, "backend_tokenizer", None)
        parts = (str(getattr(backend, "pre_tokenizer", "")), getattr(backend, "normalizer", ""))
        plain = "ByteLevel" in parts[0] and parts[1] is None
        _LONGEST[llm] = max(map(len, llm.tokenizer.get_vocab()), default=0) if plain else 0
    return _LONGEST[llm]


def rendered(
    request: Any, tools: list[dict[str, Any]] | None, llm: LLM, extra: Mapping[str, Any]
) -> list[int] | Fault:
    """The prompt of a conversation by the model's template, as token ids, or what is wrong with it.

    request: with messages, add_generation_prompt and chat_template_kwargs. extra: more for the template, which must use
    all of it.
    """
    more = {**(request.chat_template_kwargs or {}), **extra}
    twice = next((name for name in extra if name in (request.chat_template_kwargs or {})), None)
    if twice is not None:
        return Fault(twice, extra[twice], "stands in chat_template_kwargs too; give one of them")
    try:
        template = chats.template_of(llm.tokenizer, None, tools)
        for i, message in enumerate(request.messages):
            if message.role not in ROLES and not _quotes(template, message.role):
                rule = f"must be one of {', '.join(ROLES)}; the chat template knows no other"
                return Fault(f"messages[{i}].role", message.role, rule)
        if any(message.tool_calls for message in request.messages) and "tool_calls" not in template:
            return Fault("messages", None, "hold tool_calls, which the chat template does not use; leave them out")
        ids = llm.render(
            [as_template_has_it(message, template) for message in request.messages], tools=tools,
            chat_template_kwargs=more, add_generation_prompt=request.add_generation_prompt is not False,
        )  # fmt: skip
    except RequestError as error:
        field, _, rule = str(error).partition(": ")
        name = next((name for name in ARGUMENTS if field == name), None)
        named = next((key for key in extra if f"does not use {key!r}" in str(error)), None)
        if named is not None:
            return Fault(named, extra[named], "the chat template does not use it; leave it out")
        return Fault(name or "messages", None, rule if name else str(error))
    return ids


def _quotes(template: str, word: str) -> bool:
    return f"'{word}'" in template or f'"{word}"' in template


def as_template_has_it(message: Message, template: str) -> dict[str, Any]:
    """A message as a chat template reads it: the arguments of calls as objects, which it writes in its own way; a
    developer, where it knows none, as the system."""
    given = {**message.model_dump(exclude_none=True), "content": message.content}
    if message.role == "developer" and not _quotes(template, "developer"):
        given["role"] = "system"
    if not message.tool_calls:
        given.pop("tool_calls", None)  # templates look whether there is a list, not whether anything is in it
    for call in given.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            continue  # what the model wrote, as it wrote it
        if isinstance(arguments, dict):
            call["function"]["arguments"] = arguments
    return given


def num_kept(ids: Sequence[int], params: SamplingParams) -> int:
    """How many tokens of a prompt the model sees."""
    most = params.truncate_prompt_tokens
    return len(ids) if most is None else min(len(ids), most)


def context_of(limits: Limits) -> tuple[int, str]:
    """How many tokens prompt and output may be together, and why."""
    if limits.capacity is not None and limits.capacity < limits.max_model_len:
        return limits.capacity, f"all KV blocks together hold {limits.capacity}"
    return limits.max_model_len, f"the model's context is {limits.max_model_len}"


def room_of(ids: Sequence[int], params: SamplingParams, limits: Limits) -> int:
    """How many tokens fit behind a prompt."""
    return context_of(limits)[0] - num_kept(ids, params)


def faults_of_prompt(
    place: str, ids: Sequence[int], params: SamplingParams, max_tokens: int | None, llm: LLM
) -> list[Fault]:
    """What is wrong with a prompt for this model, as admission would say it; the lengths that were asked for too.

    max_tokens: that of params, or None where nobody asked for it.
    """
    limits = llm.engine.limits
    if not ids:
        return [Fault(place, list(ids), "is empty; give at least one token")]
    kept = ids[-num_kept(ids, params) :]
    outside = next((i for i in kept if not 0 <= i < limits.vocab_size), None)
    if outside is not None:
        rule = f"token ids must be in [0, {limits.vocab_size - 1}], the width of the model's logits"
        return [Fault(place, outside, rule)]
    if params.prompt_logprobs is not None and max(kept) >= limits.num_scored:
        rule = f"token ids from {limits.num_scored} on are padding and have no logprob; leave out prompt_logprobs"
        return [Fault(place, max(kept), rule)]
    textless = _first_without_text(kept, params, llm.engine.vocabulary)
    if textless is not None:
        return [Fault(place, textless, "has no text, as it is none of the tokenizer's; give another token")]
    return _of_lengths(place, len(kept), params, max_tokens, limits)


def _of_lengths(
    place: str, num_prompt: int, params: SamplingParams, max_tokens: int | None, limits: Limits
) -> list[Fault]:
    most, what = context_of(limits)
    room = most - num_prompt
    if room < (max_tokens != 0):
        way = "leave out older messages" if place == "messages" else "shorten it, or set truncate_prompt_tokens"
        rule = f"{num_prompt} tokens, and {what}: no token can follow; {way}"
        return [Fault(place, f"{num_prompt} tokens", rule)]
    if max_tokens is not None and max_tokens > room:
        asked = num_prompt + max_tokens
        rule = f"{num_prompt} prompt tokens ({place}) + max_tokens are {asked} and {what}; at most {room} fit"
        return [Fault("max_tokens", max_tokens, rule)]
    if params.min_tokens > room:
        rule = f"{num_prompt} prompt tokens ({place}), and {what}; at most {room} fit"
        return [Fault("min_tokens", params.min_tokens, rule)]
    return []


def _first_without_text(ids: Sequence[int], params: SamplingParams, vocabulary: TokenBytes | None) -> int | None:
    """A token of a prompt whose text is needed, and which has none; None: there is no such."""
    if vocabulary is None:
        return None
    try:
        TextStream(vocabulary, params, ids)  # looks whether the prompt ends in half a character
    except ModelError:
        return ids[-1]
    for token_id in dict.fromkeys(ids) if params.echo else ():
        try:
            vocabulary.bytes_of_token(token_id)
        except ModelError:
            return token_id
    return None
