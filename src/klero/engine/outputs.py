"""What comes back: names as vLLM's users know them, plus the seed."""

from __future__ import annotations

from dataclasses import dataclass

from klero.finish import StopReason


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. index: which of n. finish_reason: "stop", "length", "error" or "abort".

    stop_reason: what the caller asked to stop at (id, id sequence or string), None for the model's end and all else.
    seed: the seed it was drawn with, 0 .. 2^64-1; with the same prompt, parameters and index it gives the same tokens.
    error: the message of an error, else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: StopReason
    seed: int
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. prompt: the text given, None for ids; prompt_token_ids: as fed to the model."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True


@dataclass(frozen=True)
class Progress:
    """Where a `generate` stands: requests done, requests in all, tokens generated so far."""

    done: int
    total: int
    num_tokens: int
