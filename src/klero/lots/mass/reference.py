"""Keys, weights and masses in NumPy: the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.lots.pinned.constants import f32
from klero.lots.pinned.reference import exp32, log32

TINY_BITS = 63 << 23  # the exponent field below 63: |l| < 2^-64
TWO_40 = f32(2.0**40)
TWO_M40 = f32(2.0**-40)

F32 = npt.NDArray[np.float32]


def canonical(logits: F32) -> F32:
    """Turn every |l| < 2^-64 into +0, so that -0, subnormals and flush-to-zero cannot matter. New array."""
    bits = logits.view(np.int32)
    return np.where((bits & 0x7FFFFFFF) < TINY_BITS, np.int32(0), bits).view(np.float32)


def ordered_keys(logits: F32) -> npt.NDArray[np.uint32]:
    """Unsigned keys in the order of the logits: bits < 0 ? ~bits : bits | 2^31. logits: canonical."""
    bits = logits.view(np.uint32)
    return np.where(bits >> np.uint32(31) == 1, ~bits, bits | np.uint32(2**31))


def scaled(logits: F32, maximum: np.float32, reciprocal: np.float32) -> F32:
    """s = (l - m) * r. An overflow to -inf is meant: such a token has weight 0."""
    with np.errstate(over="ignore"):
        return (logits - maximum) * reciprocal


def weights(s: F32) -> F32:
    """w = exp32(s), in [0, 1]."""
    return exp32(s)


def masses(w: F32) -> npt.NDArray[np.uint64]:
    """q = floor(w * 2^40), as 64-bit integers."""
    return (w * TWO_40).astype(np.uint64)  # the product is exact; the conversion truncates


def lse(mass: int | np.integer) -> np.float32:
    """ln(Q * 2^-40) of a mass Q > 0, in units of the largest weight."""
    return f32(log32(np.uint64(mass).astype(np.float32) * TWO_M40))
