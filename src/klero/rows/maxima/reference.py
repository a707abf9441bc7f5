"""Block maxima in NumPy: the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.lots.mass import canonical

MAGNITUDE = 0x7FFFFFFF


def signed_keys(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Keys in the order of the logits: bits < 0 ? bits ^ 0x7fffffff : bits. NaN and infinities have keys as well."""
    bits = rows.view(np.int32)
    return np.where(bits < 0, bits ^ np.int32(MAGNITUDE), bits)


def block_maxima(row: npt.NDArray[np.float32], block: int) -> tuple[npt.NDArray[np.int32], int, int]:
    """Return the largest canonical key of each block, the row's largest raw key and its largest raw bits, unsigned."""
    keys = signed_keys(canonical(row))
    maxima = np.array([keys[i : i + block].max() for i in range(0, len(row), block)], np.int32)
    return maxima, int(signed_keys(row).max()), int(row.view(np.uint32).max())
