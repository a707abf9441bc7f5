"""Bodies as pydantic models. What they check alone is whatever is no field of SamplingParams, which checks its own.

OpenAI's fields are all known: what changes nothing here is taken, what a client would rely on in vain is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema

from klero.server.fields import (
    FIELDS,
    ID,
    IDS,
    SCHEMA,
    TAG,
    TOGETHER,
    TRUE,
    Refused,
    Schema,
    given,
    integer,
    nullable,
    unless,
)
from klero.server.messages import (
    CHOICE,
    LABEL,
    MOST_MESSAGES,
    MOST_TOOLS,
    Label,
    Message,
    Named,
    Strict,
    Templated,
    Tool,
    choice_of,
    listed,
)

__all__ = [
    "Body",
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Message",
    "Named",
    "Strict",
    "TokenizeRequest",
    "in_line",
]


def _shown(schema: Schema, *hidden: str, rules: list[Schema]) -> ConfigDict:
    """A model whose schema has these properties and the fields of SamplingParams too. rules: between fields."""

    def add(whole: dict[str, Any]) -> None:
        properties = whole["properties"]
        whole["properties"] = {**properties, **{n: s for n, s in (FIELDS | schema).items() if n not in hidden}}
        whole["allOf"] = rules

    return ConfigDict(json_schema_extra=add)


Salt = Annotated[str, StringConstraints(min_length=1, max_length=LABEL)]


def _metadata(value: Any) -> Any:
    few = isinstance(value, dict) and len(value) <= 16
    if not few or any(not isinstance(v, str) or len(k) > 64 or len(v) > 512 for k, v in value.items()):
        raise ValueError("must be at most 16 texts of at most 512 characters, under names of at most 64")
    return value


METADATA: Schema = {"type": "object", "maxProperties": 16, "propertyNames": {"maxLength": 64},
                    "additionalProperties": {"type": "string", "maxLength": 512}}  # fmt: skip


def _integer64(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError("must be an integer of 64 bits")
    return value


TEXT_OR_IDS: Schema = {"anyOf": [{"type": "string"}, {**IDS, "minItems": 1}]}
PROMPT: Schema = {"anyOf": [*TEXT_OR_IDS["anyOf"], {"type": "array", "items": TEXT_OR_IDS, "minItems": 1}]}


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or many, as a list of texts and lists of ids."""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) or _are_ids(one) for one in value):
        raise ValueError("must be a text, a list of token ids (integers >= 0), or a list of at least one of these")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


class StreamOptions(Strict):
    """Of a stream. include_usage: one more chunk before the end, without choices."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Refused("streams are not padded here", False)] = None


def _format(value: Any) -> dict[str, Any]:
    """response_format as fields of SamplingParams."""
    known = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"},
             "structural_tag": {"type", "structures", "triggers"}}  # fmt: skip
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f'must be an object whose "type" is one of {", ".join(known)}')
    if unknown := set(value) - known[kind]:
        raise ValueError(f"{sorted(unknown)[0]!r:.40} is not known in a format of type {kind!r}")
    if kind == "json_schema":
        return {"json": _schema_of(value.get("json_schema"))}
    if kind == "structural_tag":
        return {"structural_tag": dict(value)}
    return {"json_object": True} if kind == "json_object" else {}


def _schema_of(value: Any) -> Any:
    if not isinstance(value, Mapping) or not isinstance(value.get("schema"), Mapping | bool):
        raise ValueError('json_schema must be {"name": text, "schema": a JSON schema}')
    if unknown := set(value) - {"schema", *BESIDE_SCHEMA}:
        raise ValueError(f"{sorted(unknown)[0]!r:.40} is not known in json_schema")
    for name, (kind, what) in BESIDE_SCHEMA.items():
        if not isinstance(value.get(name), kind | None):
            raise ValueError(f"json_schema.{name} must be {what}")
    return value["schema"]


BESIDE_SCHEMA: dict[str, tuple[type, str]] = {
    "name": (str, "a text"), "description": (str, "a text"), "strict": (bool, "true or false"),
}  # fmt: skip
_BESIDE: Schema = {name: {"type": [kind, "null"]} for name, kind in
                   (("name", "string"), ("description", "string"), ("strict", "boolean"))}  # fmt: skip


def _kind(kind: str, **properties: Schema) -> Schema:
    """One kind of response_format: what it must have, and nothing else."""
    return {"type": "object", "properties": {"type": {"const": kind}, **properties},
            "required": ["type", *properties], "additionalProperties": False}  # fmt: skip


FORMAT: Schema = {"oneOf": [
    _kind("text"),
    _kind("json_object"),
    _kind("json_schema", json_schema={
        "type": "object", "properties": {"schema": SCHEMA, **_BESIDE}, "required": ["schema"],
        "additionalProperties": False,
    }),
    _kind("structural_tag", **{name: TAG["properties"][name] for name in ("structures", "triggers")}),
]}  # fmt: skip


class Body(Strict):
    """What both routes take beside the fields of SamplingParams."""

    model: Annotated[str | None, Field(description="The model's name; unset: the one that is served.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[
        Any, PlainValidator(_format), WithJsonSchema(nullable(FORMAT, "What the text is, as OpenAI says it."))
    ] = None
    priority: Annotated[
        int | None, AfterValidator(lambda value: None if value is None else _integer64(value)),
        WithJsonSchema(integer(-(2**63), "The lower goes first, where the server schedules so.", 2**63 - 1)),
    ] = None  # fmt: skip
    cache_salt: Annotated[Salt | None, Field(description="Cached prefixes are shared with the same salt alone.")] = None
    request_id: Annotated[Salt | None, Field(description="A label of your own, which the answer repeats.")] = None
    return_token_ids: Annotated[bool | None, Field(description="Token ids of prompt and output.")] = None
    return_receipts: Annotated[bool | None, Field(description="What each token was drawn from: docs/server.md.")] = None
    user: Annotated[Label | None, Field(description="A label; changes nothing.")] = None


class CompletionRequest(Body):
    """The body of /v1/completions. Unknown fields are refused."""

    model_config = _shown({"max_tokens": integer(0, "Most tokens of a choice. Default 16.")}, rules=TOGETHER)

    prompt: Annotated[Any, PlainValidator(_prompts), WithJsonSchema(PROMPT)]
    best_of: Annotated[
        int | None, WithJsonSchema(integer(1, "Only what n is: no choices are made to be thrown away."))
    ] = None
    suffix: Annotated[Any, Refused("text is only continued here, never filled in")] = None


class ChatCompletionRequest(Body, Templated):
    """The body of /v1/chat/completions. Unknown fields are refused."""

    model_config = _shown(
        {"max_completion_tokens": integer(0, "The same as max_tokens."),
         "max_tokens": integer(0, "Most tokens of a choice; unset: as many as fit.")},
        "logprobs", "echo",
        rules=[
            *TOGETHER,
            unless("top_logprobs", 0, beside=[given("logprobs", TRUE)]),
            unless("tool_choice", "none", beside=[given("tools", {"type": "array", "minItems": 1})]),
        ],
    )  # fmt: skip

    logprobs: bool | None = None
    top_logprobs: Annotated[
        Any, WithJsonSchema(integer(0, "So many of the most likely tokens beside each; needs logprobs.", 20))
    ] = None
    tool_choice: Annotated[
        Any, PlainValidator(choice_of), WithJsonSchema(nullable(CHOICE, "Whether tools are called."))
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[Label | None, Field(description="Goes to the chat template, which must use it.")] = None
    metadata: Annotated[
        Any, PlainValidator(_metadata), WithJsonSchema(nullable(METADATA, "Labels; change nothing."))
    ] = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    store: Annotated[Any, Refused("nothing is stored here", False)] = None
    service_tier: Annotated[Any, Refused("there is one tier", "auto", "default")] = None
    modalities: Annotated[Any, Refused("only text is served", ["text"])] = None
    audio: Annotated[Any, Refused("only text is served")] = None
    prediction: Annotated[Any, Refused("predicted outputs are not used here")] = None
    verbosity: Annotated[Any, Refused("no model here has it")] = None
    web_search_options: Annotated[Any, Refused("nothing is searched here")] = None
    moderation: Annotated[Any, Refused("nothing is moderated here")] = None
    prompt_cache_options: Annotated[Any, Refused("prefixes are cached by themselves here")] = None
    prompt_cache_retention: Annotated[Any, Refused("prefixes are cached in memory here", "in_memory")] = None
    functions: Annotated[Any, Refused("is OpenAI's older way; use tools")] = None
    function_call: Annotated[Any, Refused("is OpenAI's older way; use tool_choice")] = None


def _alone(name: str, *others: str) -> Schema:
    """A field is there, and the others are not."""
    part = given(name)
    return {**part, "properties": {**part["properties"], **{other: {"enum": [None]} for other in others}}}


class TokenizeRequest(Strict):
    """The body of /tokenize: a prompt, or messages with what their template takes."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [
        _alone("prompt", "messages", "tools", "add_generation_prompt", "chat_template_kwargs"),
        _alone("messages", "prompt", "add_special_tokens"),
    ]})  # fmt: skip

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: Annotated[bool | None, Field(description="As the tokenizer does. Default true.")] = None
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MOST_MESSAGES), listed(Message, 1, MOST_MESSAGES)
    ] | None = None  # fmt: skip
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS), listed(Tool, 0, MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True), WithJsonSchema({"type": "array", "items": ID})]
    skip_special_tokens: Annotated[bool | None, Field(description="Hide special tokens. Default false.")] = None


def in_line(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a model without references, which can stand anywhere in an OpenAPI schema."""
    schema = model.model_json_schema()
    whole: dict[str, Any] = _inline(schema, schema.get("$defs", {}))
    return whole


def _inline(part: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema with each reference replaced by what it means."""
    if isinstance(part, list):
        return [_inline(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        rest = {key: value for key, value in part.items() if key != "$ref"}
        return {**_inline(definitions[part["$ref"].rsplit("/", 1)[1]], definitions), **rest}
    return {key: _inline(value, definitions) for key, value in part.items() if key != "$defs"}
