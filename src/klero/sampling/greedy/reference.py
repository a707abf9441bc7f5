"""Greedy in NumPy: the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.lots.mass import ordered_keys


def greedy(logits: npt.NDArray[np.float32]) -> int:
    """Return the lowest id of the largest logit. logits: canonical [V], without NaN."""
    return int(np.argmax(ordered_keys(logits)))
