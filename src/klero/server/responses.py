"""Answers as pydantic models: what OpenAPI says of them. The answers themselves are made as dictionaries."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Said(BaseModel):
    """No field but those named."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(Said):
    """What went wrong. param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Said):
    """The body of every answer that is an error."""

    error: ErrorObject


class PromptTokensDetails(Said):
    """cached_tokens: prompt tokens that had been computed before."""

    cached_tokens: int


class Usage(Said):
    """Tokens of all prompts, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Receipt(Said):
    """What is said about one token; what was not asked for, or is not known, is left out. -9999.0 stands for -inf.

    logprob, rank: in the mode asked for. raw, processed: its logprobs in the model's own row and in what it was drawn
    from. kept_mass: ln of the share that the filters left; num_kept: how many tokens. top, listed: [id, logprob] of the
    most likely tokens, and of logprob_token_ids. kept_ids, kept_probs: what the filters left.
    """

    token_id: int | None = None
    logprob: float | None = None
    rank: int | None = None
    raw: float | None = None
    processed: float | None = None
    kept_mass: float | None = None
    num_kept: int | None = None
    top: list[tuple[int, float]] | None = None
    listed: list[tuple[int, float]] | None = None
    kept_ids: list[int] | None = None
    kept_probs: list[float] | None = None


class Extras(Said):
    """What klero says of a choice beside OpenAI's fields.

    stop_reason: what of the request stopped it. seed, reproducible: in a stream in the first chunk of a choice. On
    request: token_ids, prompt_token_ids, receipts (one for each of token_ids), prompt_logprobs (one for each prompt
    token, with the first choice of a prompt; null where nothing is said).
    """

    stop_reason: int | list[int] | str | None = None
    seed: int | None = None
    reproducible: bool | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    receipts: list[Receipt | None] | None = None
    prompt_logprobs: list[Receipt | None] | None = None


class LegacyLogprobs(Said):
    """Four lists with an entry for each token; text_offset: where it begins in prompt and output."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Said):
    """A likely token. bytes: of its text; none for a special token that the text does not show."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that came, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Said):
    """One entry for each token."""

    content: list[TokenLogprob]
    refusal: None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionChoice(Extras):
    """One choice. index: choice j of prompt i is i * n + j."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionChunkChoice(CompletionChoice):
    """What is new of one choice; finish_reason with its last."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CalledFunction(Said):
    """Which function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Said):
    """A call that the model wants to be made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCall):
    """A call in a stream, whole. index: which call of the choice."""

    index: int


class AnswerMessage(Said):
    """What the assistant says. content is null where there are calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Extras):
    """One choice."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class AnswerDelta(Said):
    """What is new of a message; role with its first."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Extras):
    """What is new of one choice; finish_reason with its last."""

    index: int
    delta: AnswerDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class Envelope(Said):
    """Around every answer. request_id: the client's own label."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    request_id: str | None = None


class CompletionResponse(Envelope):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Envelope):
    """An event of its stream. usage: only where it was asked for, null but in the last, which has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class ChatCompletionResponse(Envelope):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Envelope):
    """An event of its stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TokenizeResponse(Said):
    """The answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(Said):
    """The answer of /detokenize."""

    prompt: str


class ModelCard(Said):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Said):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Said):
    """The answer of /health."""

    status: Literal["ok", "failed"]


class Readiness(Said):
    """The answer of /ready."""

    status: Literal["loading", "ready", "draining", "failed"]
