"""From conversations to token ids, by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from klero.errors import RequestError

Message = Mapping[str, Any]
Conversation = Sequence[Message]

_OURS = ("messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict", "return_tensors")
_NO_VARIABLE = (".", "|", "is", "for", "macro")  # what stands behind them is none
_OF_TOKENIZER = ("continue_final_message",)  # acts after the template, which need not mention it


def conversations_of(messages: Any) -> dict[str, list[Message]]:
    """One conversation or a list of them, each under its place in the call. RequestError names what is wrong."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: {_kind(messages)}; must be a list of messages, or a list of such lists")
    if not messages:
        raise RequestError("messages: empty; give at least one message, such as {'role': 'user', 'content': '...'}")
    if isinstance(messages[0], Mapping):
        return {"messages": checked("messages", messages)}
    places = [f"messages[{i}]" for i in range(len(messages))]
    return {place: checked(place, conversation) for place, conversation in zip(places, messages, strict=True)}


def render(
    tokenizer: Any,
    conversation: Conversation,
    *,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of one checked conversation; special tokens are the template's alone, bos among them.

    RequestError: no tokenizer, no template, an argument that the template does not use, a template that fails.
    """
    template, extra = template_of(tokenizer, chat_template, tools), dict(chat_template_kwargs or {})
    _check_used(template, tools, extra)
    try:
        ids = tokenizer.apply_chat_template(
            [{**message, "content": _text(message.get("content"))} for message in conversation],
            chat_template=template,
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **extra,
        )
    except Exception as error:  # a template may raise anything, and so may what it calls
        raise RequestError(f"the chat template refused the conversation: {type(error).__name__}: {error}") from error
    if not ids:
        raise RequestError("the chat template made no token of the conversation; look at it, or pass chat_template")
    return [int(token_id) for token_id in ids]


def template_of(tokenizer: Any, chat_template: str | None, tools: Sequence[Any] | None) -> str:
    """The template that is used: the one given (a template or the name of one of the tokenizer's), or its own."""
    if tokenizer is None:
        raise RequestError("a conversation needs a tokenizer; pass LLM(tokenizer=...), or token ids to generate")
    if not hasattr(tokenizer, "apply_chat_template"):
        raise RequestError(
            f"{type(tokenizer).__name__} has no chat templates; load the tokenizer with transformers.AutoTokenizer"
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the tokenizer has no chat template (its model may not be made for chat); pass chat_template=..., "
            "or write the prompt yourself for generate"
        )
    try:
        return str(tokenizer.get_chat_template(chat_template, None if tools is None else list(tools)))
    except Exception as error:  # several templates and none that fits
        raise RequestError(f"chat_template={chat_template!r}: {error}") from None


@lru_cache(maxsize=16)
def names_in(template: str) -> frozenset[str]:
    """The variables that a template reads: names in its code that are no attribute, filter, test or loop's own."""
    import jinja2

    try:
        code = [token[1:] for token in jinja2.Environment().lex(template) if token[1] != "whitespace"]
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template cannot be read: {error}") from None
    pairs = [(last[1], name) for last, (kind, name) in pairwise([("", ""), *code]) if kind == "name"]
    own = {name for last, name in pairs if last == "for"}
    return frozenset(name for last, name in pairs if last not in _NO_VARIABLE) - own


def _check_used(template: str, tools: Sequence[Any] | None, extra: dict[str, Any]) -> None:
    """Refuse what the template would drop without a word."""
    ours = [name for name in extra if name in _OURS]
    if ours:
        raise RequestError(f"chat_template_kwargs: {ours[0]!r} is an argument of its own, or fixed; leave it out there")
    used = names_in(template)
    if tools is not None and "tools" not in used:
        raise RequestError("tools: the chat template does not use them; pass a chat_template that does")
    unused = [name for name in extra if name not in used and name not in _OF_TOKENIZER]
    if unused:
        raise RequestError(f"chat_template_kwargs: the chat template does not use {unused[0]!r}; leave it out")


def checked(where: str, conversation: Any) -> list[Message]:
    """One conversation as a list. RequestError names `where`, the message and the rule it breaks."""
    if isinstance(conversation, str | bytes | Mapping) or not isinstance(conversation, Sequence):
        raise RequestError(f"{where}: {_kind(conversation)}; a conversation is a list of messages")
    if not conversation:
        raise RequestError(f"{where}: a conversation needs at least one message")
    for j, message in enumerate(conversation):
        rule = _broken_rule(message)
        if rule:
            raise RequestError(f"{where}[{j}]: {rule}")
    return list(conversation)


def _broken_rule(message: Any) -> str | None:
    """What is wrong with a message; None if nothing is."""
    if not isinstance(message, Mapping):
        return f"{_kind(message)}; a message is a dict with 'role' and 'content'"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return f"role={role!r}: must be a non-empty string, such as 'system', 'user' or 'assistant'"
    if content is None:
        if message.get("tool_calls"):
            return None
        return "content is missing; only a message with 'tool_calls' does without"
    if isinstance(content, str):
        return None
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        return f"content: {_kind(content)}; must be a string, or a list of parts like {{'type': 'text', 'text': '...'}}"
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            return f"content: a part of type {part.get('type')!r}; only {{'type': 'text', 'text': '...'}} is served"
    return None


def _text(content: Any) -> str | None:
    """The content as one string: templates differ in whether they know parts, and all know this."""
    return content if content is None or isinstance(content, str) else "".join(part["text"] for part in content)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
