"""Penalties in NumPy: the definition."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from klero.params import SamplingParams
from klero.rewrite.bias.reference import LARGEST, keep_finite

F32 = npt.NDArray[np.float32]
IDS = npt.NDArray[np.integer]
SMALLEST_NORMAL = np.float32(2.0**-126)


class Penalties(NamedTuple):
    """The penalties of one row, rounded to binary32. The neutral values change nothing, bit for bit."""

    repetition: float = 1.0
    reciprocal: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


PENALTIES = np.dtype([(name, np.float32) for name in Penalties._fields], align=True)


def penalties_of(params: SamplingParams) -> Penalties:
    """Round what was asked, once, on the host; 1/r from the binary64 r. Beyond binary32 it becomes the border."""
    repetition = max(np.float32(params.repetition_penalty), SMALLEST_NORMAL)
    reciprocal = np.float32(min(1 / max(params.repetition_penalty, float(SMALLEST_NORMAL)), float(LARGEST)))
    presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
    return Penalties(float(repetition), float(reciprocal), float(presence), float(frequency))


def counted_ids(params: SamplingParams, prompt_ids: IDS, output_ids: IDS) -> IDS:
    """The occurrences that count for presence and frequency, one entry each."""
    ignored = len(prompt_ids) if params.prompt_ignore_length is None else params.prompt_ignore_length
    return np.concatenate([prompt_ids[ignored:], output_ids])


def repetition(logits: F32, penalties: Penalties, seen: IDS) -> F32:
    """Scale the tokens that occurred. seen: ids, repeats allowed."""
    ids = np.unique(seen[seen < len(logits)])
    before = logits[ids]
    out = logits.copy()
    with np.errstate(over="ignore"):
        factor = np.where(before >= 0, np.float32(penalties.reciprocal), np.float32(penalties.repetition))
        out[ids] = keep_finite(before * factor, before)
    return out


def presence_and_frequency(logits: F32, penalties: Penalties, counted: IDS) -> F32:
    """Lower the tokens by how often they occurred. counted: one entry for each occurrence."""
    ids, counts = np.unique(counted[counted < len(logits)], return_counts=True)
    before = logits[ids]
    out = logits.copy()
    with np.errstate(over="ignore"):
        drop = np.float32(penalties.presence) + np.float32(penalties.frequency) * counts.astype(np.float32)
        out[ids] = keep_finite(before - drop, before)
    return out
