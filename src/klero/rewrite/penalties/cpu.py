"""Penalties for Numba. Agreement with the reference: *bits*."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import inline
from klero.rewrite.bias.cpu import F32, keep_finite


@inline
def penalised(logit: np.float32, count: np.int32, p: Any) -> np.float32:
    """The logit of a token that occurred. count: occurrences that count; p: a record of PENALTIES."""
    factor = p.reciprocal if logit >= F32(0) else p.repetition
    scaled = keep_finite(F32(logit * factor), logit)
    if count <= 0:
        return scaled
    drop = F32(p.presence + F32(p.frequency * F32(count)))
    return keep_finite(F32(scaled - drop), scaled)
