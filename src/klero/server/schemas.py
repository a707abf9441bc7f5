"""Bodies as pydantic models. What they check alone is whatever is no field of SamplingParams, which checks its own.

OpenAI's fields are all known: what changes nothing here is taken, what a client would rely on in vain is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from klero.server.fields import FIELDS, ID, IDS, Refused, Schema, integer, nullable
from klero.server.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionChunk,
    CompletionResponse,
    DetokenizeResponse,
    ErrorResponse,
    Health,
    ModelCard,
    ModelList,
    TokenizeResponse,
)

__all__ = [
    "Body",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "CompletionChunk",
    "CompletionRequest",
    "CompletionResponse",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ErrorResponse",
    "Health",
    "Message",
    "ModelCard",
    "ModelList",
    "Named",
    "Strict",
    "TokenizeRequest",
    "TokenizeResponse",
    "in_line",
    "request_body",
]

LABEL = 256
MOST_FIELDS, MOST_MESSAGES, MOST_TOOLS = 256, 8192, 512  # so that what is wrong with them can be told
NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class Strict(BaseModel):
    """No field but those named, and no value turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"has {len(value)} fields, and there are not as many to know")
        return value


def _shown(schema: Schema, *hidden: str) -> ConfigDict:
    """A model whose schema has these properties and the fields of SamplingParams too."""

    def add(whole: dict[str, Any]) -> None:
        properties = whole["properties"]
        whole["properties"] = {**properties, **{n: s for n, s in (FIELDS | schema).items() if n not in hidden}}

    return ConfigDict(json_schema_extra=add)


Label = Annotated[str, StringConstraints(max_length=LABEL)]
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
        raise ValueError("must be a text, a list of token ids (integers), or a list of at least one of these")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


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
    if unknown := set(value) - {"name", "description", "schema", "strict"}:
        raise ValueError(f"{sorted(unknown)[0]!r:.40} is not known in json_schema")
    return value["schema"]


FORMAT: Schema = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"}, "description": {"type": "string"}, "strict": {"type": "boolean"},
                        "schema": {"anyOf": [{"type": "object"}, {"type": "boolean"}]},
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "structural_tag"}, "structures": {"type": "array"},
                           "triggers": {"type": "array"}},
            "required": ["type", "structures", "triggers"],
        },
    ]
}  # fmt: skip


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

    model_config = _shown({"max_tokens": integer(0, "Most tokens of a choice. Default 16.")})

    prompt: Annotated[Any, PlainValidator(_prompts), WithJsonSchema(PROMPT)]
    best_of: Annotated[
        int | None, WithJsonSchema(integer(1, "Only what n is: no choices are made to be thrown away."))
    ] = None
    suffix: Annotated[Any, Refused("text is only continued here, never filled in")] = None


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """Which function was called. arguments: JSON."""

    name: str
    arguments: str


class MadeCall(Strict):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def _content(value: Any) -> Any:
    """A text, or parts of texts, as one text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, or a list of parts {'type': 'text', 'text': ...}")
    return "".join(TextPart.model_validate(part).text for part in value)


CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {
    "type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"], "additionalProperties": False}}]}  # fmt: skip


class Message(Strict):
    """One message of a conversation, as the chat template gets it."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Annotated[Any, PlainValidator(_content), WithJsonSchema(nullable(CONTENT, "Text."))] = None
    name: Label | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    refusal: Annotated[Any, Refused("a refusal is content here")] = None
    annotations: Annotated[Any, Refused("there are no annotations here", [])] = None
    audio: Annotated[Any, Refused("only text is served")] = None
    function_call: Annotated[Any, Refused("is OpenAI's older way; use tool_calls")] = None


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, StringConstraints(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function


class Named(NamedTuple):
    """The one function that must be called."""

    name: str


def _choice(value: Any) -> str | Named:
    """tool_choice: a word, or the function named."""
    if value in ("none", "auto", "required") and isinstance(value, str):
        return value
    named = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str) or len(value) > 2 or len(named) > 1:
        raise ValueError(
            "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        )
    return Named(named["name"])


CHOICE: Schema = {"anyOf": [{"enum": ["none", "auto", "required"]}, {
    "type": "object", "required": ["type", "function"], "properties": {
        "type": {"const": "function"}, "function": {
            "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}}]}  # fmt: skip


class Templated(Strict):
    """What makes a prompt of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    add_generation_prompt: Annotated[bool | None, Field(description="Open the assistant's turn. Default true.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="More for the chat template.")] = None


class ChatCompletionRequest(Body, Templated):
    """The body of /v1/chat/completions. Unknown fields are refused."""

    model_config = _shown(
        {"max_completion_tokens": integer(0, "The same as max_tokens."),
         "max_tokens": integer(0, "Most tokens of a choice; unset: as many as fit.")},
        "logprobs", "echo",
    )  # fmt: skip

    logprobs: bool | None = None
    top_logprobs: Annotated[
        Any, WithJsonSchema(integer(0, "So many of the most likely tokens beside each; needs logprobs.", 20))
    ] = None
    tool_choice: Annotated[
        Any, PlainValidator(_choice), WithJsonSchema(nullable(CHOICE, "Whether tools are called."))
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


class TokenizeRequest(Strict):
    """The body of /tokenize: a prompt, or messages with what their template takes."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: Annotated[bool | None, Field(description="As the tokenizer does. Default true.")] = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True), WithJsonSchema({"type": "array", "items": ID})]
    skip_special_tokens: Annotated[bool | None, Field(description="Hide special tokens. Default false.")] = None


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a route whose body this is: its schema in line, as the route reads the body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": in_line(model)}}}}


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
