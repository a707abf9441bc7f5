"""/tokenize and /detokenize: what a text or a conversation is to the model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from klero.errors import Fault, ModelError, RequestError
from klero.finish import TextStream
from klero.params import SamplingParams
from klero.server.bodies import parsed, unknown
from klero.server.errors import bad_request, refusal_of
from klero.server.prompts import Rendered, rendered
from klero.server.schemas import DetokenizeRequest, Strict, TokenizeRequest

if TYPE_CHECKING:
    from klero.engine import LLM
    from klero.server.options import ServerOptions

B = TypeVar("B", bound=Strict)
OF_MESSAGES = ("tools", "add_generation_prompt", "chat_template_kwargs")


def tokenize_of(body: Mapping[str, Any], llm: LLM, options: ServerOptions) -> dict[str, Any]:
    """The answer of /tokenize. ApiError 400 for what cannot be read."""
    request = _read(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise refusal_of([Fault("prompt", request.prompt, "give a prompt or messages, one of the two")])
    beside = OF_MESSAGES if request.messages is None else ("add_special_tokens",)
    faults = [
        Fault(name, value, f"means nothing beside {'prompt' if request.messages is None else 'messages'}")
        for name in beside
        if (value := getattr(request, name)) is not None
    ]
    if faults:
        raise refusal_of(faults)
    ids = _ids_of(request, llm)
    return {"tokens": ids, "count": len(ids), "max_model_len": llm.engine.max_model_len}


def _ids_of(request: TokenizeRequest, llm: LLM) -> list[int]:
    if request.messages is not None:
        tools = None if not request.tools else [tool.model_dump(exclude_none=True) for tool in request.tools]
        one = rendered(request, tools, llm, {})
        if not isinstance(one, Rendered):
            raise refusal_of([one])
        return one.ids
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
    request = _read(body, DetokenizeRequest)
    vocabulary = llm.engine.vocabulary
    if vocabulary is None:
        raise bad_request("the model has no tokenizer, so its tokens have no text", "tokens")
    stream = TextStream(vocabulary, SamplingParams(skip_special_tokens=bool(request.skip_special_tokens)))
    for token_id in request.tokens:
        if not 0 <= token_id < llm.engine.limits.vocab_size:
            rule = f"token ids must be in [0, {llm.engine.limits.vocab_size - 1}], the width of the model's logits"
            raise refusal_of([Fault("tokens", token_id, rule)])
        try:
            stream.push(token_id)
        except ModelError:
            raise refusal_of([Fault("tokens", token_id, "has no text: it is none of the tokenizer's")]) from None
    stream.finish()
    return {"prompt": stream.text}


def _read(body: Mapping[str, Any], model: type[B]) -> B:
    """The fields of a body; null is silence. ApiError 400 with every fault."""
    known = list(model.model_fields)
    request, faults = parsed({n: v for n, v in body.items() if n in known and v is not None}, model)
    faults += unknown([(name, value) for name, value in body.items() if name not in known], known)
    if faults:
        raise refusal_of(faults)
    return request
