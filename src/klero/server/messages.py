"""Conversations and tools as pydantic models: what a chat template gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from klero.server.errors import MOST_FAULTS, rule_of
from klero.server.fields import Refused, Schema, given, nullable

LABEL = 256
MOST_FIELDS, MOST_MESSAGES, MOST_TOOLS, MOST_PARTS = 256, 8192, 512, 2**16
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


def each(model: type[Strict], value: Any, least: int, most: int) -> list[Any]:
    """A list of models. It stops at many faults: hundreds of thousands, each with its place, would fill the memory."""
    if not isinstance(value, list) or not least <= len(value) <= most:
        got = f", and has {len(value)}" if isinstance(value, list) else ""
        raise ValueError(f"must be a list of {least} to {most} objects{got}")
    read, faults = list[Any](), list[InitErrorDetails]()
    for i, item in enumerate(value):
        try:
            read.append(model.model_validate(item))
        except ValidationError as error:
            faults += _faults_at(i, error)
            if len(faults) > MOST_FAULTS:
                break
    if faults:
        raise ValidationError.from_exception_data(model.__name__, faults)
    return read


def listed(model: type[Strict], least: int, most: int) -> Any:
    """The same for a field; its schema is said by the bounds beside."""
    return WrapValidator(lambda value, handler: each(model, value, least, most))


def _faults_at(place: int, error: ValidationError) -> list[InitErrorDetails]:
    """The faults of one entry as those of its list."""
    return [
        InitErrorDetails(
            type=PydanticCustomError(one["type"], "{rule}", {"rule": rule_of(one)}),
            loc=(place, *one["loc"]), input=one["input"],
        )
        for one in error.errors(include_url=False)
    ]  # fmt: skip


Label = Annotated[str, StringConstraints(max_length=LABEL)]


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Copied = Annotated[Any, Field(exclude=True, description="What a client's helpers add to an answer; changes nothing.")]
"""Messages come back as clients have them: the same once more, parsed, which no template gets."""


class CalledFunction(Strict):
    """Which function was called. arguments: JSON."""

    name: str
    arguments: str
    parsed_arguments: Copied = None


class MadeCall(Strict):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Copied = None


def _content(value: Any) -> Any:
    """A text, or parts of texts, as one text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, or a list of parts {'type': 'text', 'text': ...}")
    return "".join(part.text for part in each(TextPart, value, 1, MOST_PARTS))


CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "maxItems": MOST_PARTS, "items": {
    "type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"], "additionalProperties": False}}]}  # fmt: skip


class Message(Strict):
    """One message of a conversation, as the chat template gets it."""

    model_config = ConfigDict(json_schema_extra={
        "anyOf": [given("content"), given("tool_calls", {"type": "array", "minItems": 1})]
    })  # fmt: skip

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Annotated[Any, PlainValidator(_content), WithJsonSchema(nullable(CONTENT, "Text."))] = None
    name: Label | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=MOST_TOOLS), listed(MadeCall, 0, MOST_TOOLS)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    parsed: Copied = None
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


def choice_of(value: Any) -> str | Named:
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
    "type": "object", "required": ["type", "function"], "additionalProperties": False, "properties": {
        "type": {"const": "function"}, "function": {
            "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
            "additionalProperties": False}}}]}  # fmt: skip


class Templated(Strict):
    """What makes a prompt of a conversation."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MOST_MESSAGES), listed(Message, 1, MOST_MESSAGES)
    ]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS), listed(Tool, 0, MOST_TOOLS)] | None = None
    add_generation_prompt: Annotated[bool | None, Field(description="Open the assistant's turn. Default true.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="More for the chat template.")] = None
