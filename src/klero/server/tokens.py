"""/tokenize and /detokenize: what a text or a conversation is to the model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from klero.errors import Fault, ModelError, RequestError
from klero.finish import TextStream
from klero.params import SamplingParams
from klero.server.bodies import parsed, unknown
from klero.server.errors import bad_request, model_not_found, refusal_of
from klero.server.prompts import rendered
from klero.server.schemas import DetokenizeRequest, Strict, TokenizeRequest

if TYPE_CHECKING:
    from klero.engine import LLM
    from klero.server.options import ServerOptions

B = TypeVar("B", bound=Strict)
BESIDE = {
    "prompt": ("tools", "add_generation_prompt", "chat_template_kwargs"), "messages": ("add_special_tokens",),
}  # fmt: skip
"""What may be tokenized, and the fields that mean nothing beside it."""


def tokenize_of(body: Mapping[str, Any], llm: LLM, options: ServerOptions) -> dict[str, Any]:
    """The answer of /tokenize. ApiError 400 for what cannot be read."""
    request, faults = _read(body, TokenizeRequest)
    given = [name for name in BESIDE if body.get(name) is not None]
    if len(given) != 1:
        faults.append(Fault("prompt", body.get("prompt"), "give a prompt or messages, one of the two"))
    for name in BESIDE[given[0]] if len(given) == 1 else ():
        if body.get(name) is not None:
            faults.append(Fault(name, body[name], f"means nothing beside {given[0]}"))
    _check(request.model, faults, options)
    ids = _ids_of(request, llm)
    return {"tokens": ids, "count": len(ids), "max_model_len": llm.engine.max_model_len}


def _ids_of(request: TokenizeRequest, llm: LLM) -> list[int]:
    if request.messages is not None:
        tools = None if not request.tools else [tool.model_dump(exclude_none=True) for tool in request.tools]
        one = rendered(request, tools, llm, {})
        if isinstance(one, Fault):
            raise refusal_of([one])
        return one
    assert request.prompt is not None
    try:
        ids = llm.tokenize(request.prompt)
    except RequestError as error:
        raise bad_request(str(error), "prompt") from None
    if request.add_special_tokens is False and llm.engine.encode is not None:
        ids = llm.engine.encode(request.prompt)
    return list(ids)


def detokenize_of(body: Mapping[str, Any], llm: LLM, options: ServerOptions) -> dict[str, Any]:
    """The answer of /detokenize: the text that the engine would make of these tokens. ApiError 400 for ids without."""
    request, faults = _read(body, DetokenizeRequest)
    vocabulary, width = llm.engine.vocabulary, llm.engine.limits.vocab_size
    outside = next((token_id for token_id in request.tokens if not 0 <= token_id < width), None)
    if outside is not None:
        rule = f"token ids must be in [0, {width - 1}], the width of the model's logits"
        faults.append(Fault("tokens", outside, rule))
    _check(request.model, faults, options)
    if vocabulary is None:
        raise bad_request("the model has no tokenizer, so its tokens have no text", "tokens")
    stream = TextStream(vocabulary, SamplingParams(skip_special_tokens=bool(request.skip_special_tokens)))
    for token_id in request.tokens:
        try:
            stream.push(token_id)
        except ModelError:
            raise refusal_of([Fault("tokens", token_id, "has no text: it is none of the tokenizer's")]) from None
    stream.finish()
    return {"prompt": stream.text}


def _read(body: Mapping[str, Any], model: type[B]) -> tuple[B, list[Fault]]:
    """The fields of a body, and what is wrong with them; null is silence."""
    known = list(model.model_fields)
    request, faults = parsed({n: v for n, v in body.items() if n in known and v is not None}, model)
    return request, faults + unknown([(name, value) for name, value in body.items() if name not in known], known)


def _check(model: str | None, faults: list[Fault], options: ServerOptions) -> None:
    """Raise ApiError: 400 with every fault, 404 for another model than the one that is served."""
    if faults:
        raise refusal_of(faults)
    if model not in (None, options.served_model_name or "klero"):
        raise model_not_found(str(model))
