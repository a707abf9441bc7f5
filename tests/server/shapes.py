"""OpenAI's own types, held strictly: what an answer lacks, has in another type, or has beside what klero documents."""

from __future__ import annotations

import json

import pydantic

CHOICE = {"stop_reason", "seed", "reproducible", "token_ids", "prompt_token_ids", "receipts", "prompt_logprobs"}
BESIDE = {
    "Completion": {"request_id"}, "ChatCompletion": {"request_id"}, "ChatCompletionChunk": {"request_id"},
    "CompletionChoice": CHOICE, "Choice": CHOICE, "Model": {"max_model_len"},
}  # fmt: skip
"""What docs/server.md says of answers beside OpenAI's fields, by the name of the type."""


def held(kind, answer):
    """An answer (an object of JSON) as the client's type; it must be one, and have nothing more than is documented.

    In two places OpenAI's answers are wider than its types, and klero's with them: chunks of completions have no
    finish_reason before their last, and of the first token of an echoed prompt nothing is said.
    """
    model = kind.model_validate_json(json.dumps(_narrowed(kind, answer)), strict=True)
    for part in _models(model):
        beside = set(part.model_extra or {}) - BESIDE.get(type(part).__name__, set())
        assert not beside, f"{type(part).__name__} has {beside}"
    return model


def _narrowed(kind, answer):
    if kind.__name__ != "Completion":
        return answer
    choices = []
    for choice in answer["choices"]:
        lists = choice["logprobs"]
        if lists is not None and lists["token_logprobs"][:1] == [None]:
            assert lists["top_logprobs"][0] is None
            lists = {name: values[1:] for name, values in lists.items()}
        choices.append({**choice, "logprobs": lists, "finish_reason": choice["finish_reason"] or "stop"})
    return {**answer, "choices": choices}


def _models(value):
    """Every model in a value."""
    if isinstance(value, list):
        for item in value:
            yield from _models(item)
    elif isinstance(value, pydantic.BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _models(getattr(value, name))
