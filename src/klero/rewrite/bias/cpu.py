"""Bias for Numba. Agreement with the reference: *bits*."""

from __future__ import annotations

import numpy as np

from klero.device import inline

F32 = np.float32
LARGEST, INF = np.finfo(np.float32).max, F32(np.inf)


@inline
def keep_finite(after: np.float32, before: np.float32) -> np.float32:
    """Turn an overflow from a finite value into the largest finite value of its sign."""
    if after == INF and before < INF:
        return LARGEST
    if after == -INF and before > -INF:
        return -LARGEST
    return after


@inline
def add_bias(logit: np.float32, bias: np.float32) -> np.float32:
    """l + b; a bias of -inf bans."""
    return keep_finite(F32(logit + bias), logit) if bias > -INF else -INF
