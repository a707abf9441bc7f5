"""The engine around the sampler: requests, scheduler, models, and `LLM`."""

from klero.engine.engine import Engine
from klero.engine.llm import LLM
from klero.engine.outputs import CompletionOutput, Progress, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Engine", "Progress", "RequestOutput"]
