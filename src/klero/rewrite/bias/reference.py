"""Bias in NumPy: the definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
LARGEST = np.finfo(np.float32).max


def keep_finite(after: F32, before: F32) -> F32:
    """Turn an overflow from a finite value into the largest finite value of its sign."""
    return np.where(np.isinf(after) & np.isfinite(before), np.copysign(LARGEST, after), after)


def add(logits: F32, bias: F32) -> F32:
    """l + b, where a bias of -inf bans. logits: canonical [N]; bias: [N], finite or -inf."""
    with np.errstate(over="ignore"):
        return np.where(np.isneginf(bias), -np.inf, keep_finite(logits + bias, logits)).astype(np.float32)


def logit_bias(logits: F32, entries: Sequence[tuple[int, float]]) -> F32:
    """Add to the listed tokens. entries: (id, bias), no id twice; ids of padding columns, past the row, do nothing."""
    inside = [(i, bias) for i, bias in entries if i < len(logits)]
    ids = np.array([i for i, _ in inside], np.int64)
    out = logits.copy()
    out[ids] = add(logits[ids], np.array([bias for _, bias in inside], np.float32))
    return out
