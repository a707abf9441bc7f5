"""What `import klero` brings, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import klero

# Numba looks for scipy by itself
HEAVY = ("torch", "triton", "transformers", "tokenizers", "typer", "fastapi", "jax", "pandas")


def test_import_pulls_in_nothing_heavy():
    code = f"import sys, klero; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_these():
    assert sorted(klero.__all__) == [
        "AsyncLLM", "BlockError", "CompletionOutput", "Delta", "Explanation", "GrammarError", "KleroError", "LLM",
        "LogitsError", "Logprobs", "MissingExtra", "ModelError", "OptionError", "ParameterError", "QueueFullError",
        "RequestError", "RequestMetrics", "RequestOutput", "RowParams", "SampleState", "Sampled", "Sampler",
        "SamplingParams", "Seat", "Slot", "SlotError", "SortedRow", "Step", "TokenUpdate", "TopK", "explain", "sample",
        "score", "topk",
    ]  # fmt: skip
    for name in klero.__all__:
        assert getattr(klero, name) is not None
        assert getattr(klero, name).__doc__


def test_every_error_is_a_klero_error():
    errors = [getattr(klero, name) for name in klero.__all__ if name.endswith(("Error", "Full", "Extra"))]
    assert all(issubclass(error, klero.KleroError) for error in errors)
