"""klero: from logits to tokens. The token is a pure function of logits, parameters, seed, position and child."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klero import finish as finish
from klero.batch import Seat, Slot, Step
from klero.errors import (
    BlockError,
    GrammarError,
    KleroError,
    LogitsError,
    MissingExtra,
    ModelError,
    OptionError,
    ParameterError,
    QueueFullError,
    RequestError,
    SlotError,
)
from klero.logprobs import Logprobs, score
from klero.params import RowParams, SamplingParams
from klero.rows.topk import TopK, topk
from klero.sampling.explain import Explanation, explain
from klero.sampling.filters import SortedRow
from klero.sampling.sampler import Sampler, SampleState, TokenUpdate
from klero.sampling.stateless import sample
from klero.sampling.work import Sampled

if TYPE_CHECKING:
    from klero.engine import LLM, AsyncLLM, CompletionOutput, Delta, RequestMetrics, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BlockError",
    "CompletionOutput",
    "Delta",
    "Explanation",
    "GrammarError",
    "KleroError",
    "LogitsError",
    "Logprobs",
    "MissingExtra",
    "ModelError",
    "OptionError",
    "ParameterError",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RowParams",
    "SampleState",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "Seat",
    "Slot",
    "SlotError",
    "SortedRow",
    "Step",
    "TokenUpdate",
    "TopK",
    "explain",
    "sample",
    "score",
    "topk",
]


def __getattr__(name: str) -> Any:
    """Load the engine when it is asked for: the library alone does without it."""
    if name in ("LLM", "AsyncLLM", "CompletionOutput", "Delta", "RequestMetrics", "RequestOutput"):
        import klero.engine

        return getattr(klero.engine, name)
    raise AttributeError(f"module 'klero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
