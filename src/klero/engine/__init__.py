"""The engine around the sampler: requests, scheduler, models, `LLM` and its asynchronous twin `AsyncLLM`."""

from klero.engine.aio import AsyncLLM
from klero.engine.engine import Engine
from klero.engine.llm import LLM
from klero.engine.options import EngineOptions
from klero.engine.outputs import CompletionOutput, Delta, Progress, RequestMetrics, RequestOutput
from klero.engine.stream import DeltaStream
from klero.engine.times import StepTimes

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Delta",
    "DeltaStream",
    "Engine",
    "EngineOptions",
    "Progress",
    "RequestMetrics",
    "RequestOutput",
    "StepTimes",
]
