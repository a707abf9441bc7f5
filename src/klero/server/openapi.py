"""The OpenAPI document: every path, field, bound and answer, with the limits of the server that is asked."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import klero
from klero.server import responses, schemas
from klero.server.fields import ID, TEXT, Schema
from klero.server.limits import MOST_CHARACTERS
from klero.server.metrics import CONTENT_TYPE
from klero.server.options import ServerOptions
from klero.server.prompts import context_of

if TYPE_CHECKING:
    from klero.engine.admission import Limits

SAID = {
    400: "A field breaks a rule, or the body is no JSON.", 401: "No key, or a wrong one.",
    404: "No such model.", 408: "The body did not come in time.", 413: "The body is too large.",
    415: "The body is not called JSON.", 429: "Too many requests wait or run.",
    500: "The server failed, or the answer has no end of its own.", 503: "Loading, draining, or the engine has failed.",
}  # fmt: skip
RETRY: Schema = {"Retry-After": {"required": True, "schema": {"type": "integer"}, "description": "Seconds."}}
HEADERS: dict[int, Schema] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}}, 429: RETRY, 503: RETRY,
}  # fmt: skip
ABOUT = (
    "A server for clients of OpenAI's API. Bounds are those of this server and its model. The names that other engines "
    "have for a field are taken too (docs/rules.md, Other spellings)."
)
ALWAYS = (401, 429, 500)
OF_BODIES = (*ALWAYS, 400, 408, 413, 415, 503)


class Route(NamedTuple):
    """One path. events: what its stream sends; errors: the statuses of its errors; parameter: the name in its path."""

    path: str
    name: str
    text: str
    answer: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    errors: tuple[int, ...] = ALWAYS
    parameter: str | None = None


ROUTES = (
    Route("/v1/models", "list_models", "The model that is served.", responses.ModelList, errors=(*ALWAYS, 503)),
    Route("/v1/models/{name}", "get_model", "The same, if that is its name.", responses.ModelCard,
          errors=(*ALWAYS, 404, 503), parameter="name"),
    Route("/v1/completions", "complete", "Continue prompts.", responses.CompletionResponse, schemas.CompletionRequest,
          responses.CompletionChunk, (*OF_BODIES, 404)),
    Route("/v1/chat/completions", "chat", "Answer a conversation.", responses.ChatCompletionResponse,
          schemas.ChatCompletionRequest, responses.ChatCompletionChunk, (*OF_BODIES, 404)),
    Route("/tokenize", "tokenize", "Token ids of a text or of a conversation.", responses.TokenizeResponse,
          schemas.TokenizeRequest, errors=(*OF_BODIES, 404)),
    Route("/detokenize", "detokenize", "The text of token ids.", responses.DetokenizeResponse,
          schemas.DetokenizeRequest, errors=(*OF_BODIES, 404)),
    Route("/health", "get_health", "Whether the server lives.", responses.Health, errors=()),
    Route("/ready", "get_ready", "Whether requests are taken.", responses.Readiness, errors=()),
    Route("/metrics", "get_metrics", "Figures for Prometheus."),
)  # fmt: skip
ANSWERS: list[type[BaseModel]] = [m for one in ROUTES for m in (one.answer, one.events) if m is not None]


class Bounds(NamedTuple):
    """What a model allows. vocab_size: token ids are below; context: tokens of prompt and output together."""

    vocab_size: int
    context: int
    takes_priority: bool


def bounds_of(limits: Limits) -> Bounds:
    """Those of an engine."""
    return Bounds(limits.vocab_size, context_of(limits)[0], limits.takes_priority)


@lru_cache(maxsize=4)
def document(options: ServerOptions, model: str, bounds: Bounds | None = None) -> Schema:
    """The OpenAPI document of a server. model: what clients call it; bounds: None while it is being loaded."""
    answers: list[type[BaseModel]] = [*ANSWERS, responses.ErrorResponse]
    _, said = models_json_schema([(one, "validation") for one in answers], ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "klero", "version": klero.__version__, "description": ABOUT},
        "security": [{}] if options.api_key is None else [{"key": []}],
        "paths": {route.path: _path(route, options, model, bounds) for route in ROUTES},
        "components": {
            "schemas": said["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _path(route: Route, options: ServerOptions, model: str, bounds: Bounds | None) -> Schema:
    """What can be done at one path."""
    done: Schema = {"operationId": route.name, "summary": route.text, "responses": _answers(route)}
    if not route.errors:
        done["security"] = [{}]
    if route.parameter is not None:
        done["parameters"] = [{
            "name": route.parameter, "in": "path", "required": True, "schema": {"type": "string"}, "example": model,
        }]  # fmt: skip
    if route.body is None:
        return {"get": done}
    body = bounded(schemas.in_line(route.body), options, model, bounds)
    return {"post": {**done, "requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}}


def _answers(route: Route) -> Schema:
    text = {CONTENT_TYPE.partition(";")[0]: {"schema": {"type": "string"}}}
    ok: Schema = {"description": "The answer.", "content": text}
    if route.answer is not None:
        ok["content"] = {"application/json": {"schema": _named(route.answer)}}
    if route.events is not None:
        ok["description"] = (
            "The answer; with stream true server-sent events, whose data are chunks, until [DONE] or an error."
        )
        ok["content"]["text/event-stream"] = {"schema": _event(route.events)}
    if route.answer in (responses.Health, responses.Readiness):
        return {"200": ok, "503": {**ok, "description": "The answer is no."}}
    error = {"application/json": {"schema": _named(responses.ErrorResponse)}}
    errors: Schema = {
        str(status): {"description": SAID[status], "content": error, "headers": HEADERS.get(status, {})}
        for status in sorted(route.errors)
    }
    return {"200": ok, **errors}


def _event(chunk: type[BaseModel]) -> Schema:
    """One event of a stream, as OpenAPI 3.2 says it for each item."""
    content = {"anyOf": [_named(chunk), _named(responses.ErrorResponse)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}


def _named(model: type[BaseModel]) -> Schema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def bounded(schema: Schema, options: ServerOptions, model: str, bounds: Bounds | None) -> Schema:
    """A body's schema with what this server and its model allow at most."""
    properties = dict(schema["properties"])
    for name, change in _changes(options, model, bounds).items():
        if name in properties and properties[name].get("type") != "boolean":
            properties[name] = {**properties[name], **change}
    if "prompt" in properties and "anyOf" in properties["prompt"]:
        *one, many = properties["prompt"]["anyOf"]
        properties["prompt"] = {**properties["prompt"], "anyOf": [*one, {**many, "maxItems": options.max_prompts}]}
    for name, most in (("stop", options.max_stop), ("bad_words", options.max_logit_bias)):
        if name in properties:
            text = {**TEXT, "maxLength": MOST_CHARACTERS[name]}
            texts = {"type": "array", "items": text, "maxItems": most}
            properties[name] = {**properties[name], "anyOf": [text, texts, {"type": "null"}]}
    if bounds is not None:
        properties = _ids_below(properties, bounds.vocab_size)
    return {**schema, "properties": properties}


def _changes(options: ServerOptions, model: str, bounds: Bounds | None) -> dict[str, Schema]:
    """What to add to the fields of this name."""
    changes: dict[str, Schema] = {
        "n": {"maximum": options.max_n}, "logit_bias": {"maxProperties": options.max_logit_bias},
        "model": {"enum": [model, None]},
    }  # fmt: skip
    most = options.max_logprobs
    if most >= 0:
        changes |= {name: {"minimum": 0, "maximum": most} for name in ("logprobs", "prompt_logprobs")}
        changes |= {"top_logprobs": {"maximum": min(most, 20)}, "logprob_token_ids": {"maxItems": most}}
    if bounds is not None:
        lengths = ("max_tokens", "max_completion_tokens", "min_tokens")
        changes |= {name: {"maximum": bounds.context - 1} for name in lengths}
        changes["embedding_bias"] = {"minItems": bounds.vocab_size, "maxItems": bounds.vocab_size}
        changes["top_p_reset_id"] = {"maximum": bounds.vocab_size - 1}
        if not bounds.takes_priority:
            changes["priority"] = {"minimum": 0, "maximum": 0}
    return changes


def _ids_below(part: Any, most: int) -> Any:
    """A schema whose token ids are below a number."""
    if part == ID:
        return {**ID, "maximum": most - 1}
    if isinstance(part, list):
        return [_ids_below(item, most) for item in part]
    return {name: _ids_below(item, most) for name, item in part.items()} if isinstance(part, dict) else part
