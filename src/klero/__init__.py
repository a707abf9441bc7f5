"""klero: from logits to tokens. The token is a pure function of logits, parameters, seed, position and child."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klero.batch import Slot, Step
from klero.errors import (
    BlockError,
    KleroError,
    LogitsError,
    MissingExtra,
    ModelError,
    ParameterError,
    QueueFull,
    RequestError,
    SlotError,
)
from klero.params import RowParams, SamplingParams
from klero.sampling.explain import Explanation, Stage, explain
from klero.sampling.sampler import Sampler, SampleState, Seat, Update
from klero.sampling.stateless import Sampled, sample

if TYPE_CHECKING:
    from klero.engine import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BlockError",
    "CompletionOutput",
    "Explanation",
    "KleroError",
    "LogitsError",
    "MissingExtra",
    "ModelError",
    "ParameterError",
    "QueueFull",
    "RequestError",
    "RequestOutput",
    "RowParams",
    "SampleState",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "Seat",
    "Slot",
    "SlotError",
    "Stage",
    "Step",
    "Update",
    "explain",
    "sample",
]


def __getattr__(name: str) -> Any:
    """Load the engine when it is asked for: the library alone does without it."""
    if name in ("LLM", "CompletionOutput", "RequestOutput"):
        import klero.engine

        return getattr(klero.engine, name)
    raise AttributeError(f"module 'klero' has no attribute {name!r}")
