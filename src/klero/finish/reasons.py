"""The four ways a sequence can end, and the record of one end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

StopReason: TypeAlias = int | tuple[int, ...] | str | None


class FinishReason(StrEnum):
    """Name the way a sequence ended; the values are the OpenAI API's, with `error` and `abort` added."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


@dataclass(frozen=True)
class Finished:
    """Say why one sequence ended.

    `stop_reason` is what the caller asked to stop at: the id of a stop id, the tuple of a stop id sequence,
    the string of a stop string; None for an end id and for every reason but `stop`. `message` explains an
    error or an abort.
    """

    reason: FinishReason
    stop_reason: StopReason = None
    message: str | None = None
