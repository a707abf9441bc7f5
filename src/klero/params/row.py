"""RowParams: what the shaping fields come to for one row, rounded once, on the host (docs/draw.md, 1).

This is the single truth about greedy or not: every path asks `resolve_row` and nobody decides for himself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TOP_K_OFF = 2**31 - 1
TOP_P_OFF = 2**32
GREEDY_BELOW = np.float32(1e-6)
SMALLEST_NORMAL = np.float32(2.0**-126)


class RowParams(NamedTuple):
    """The rounded values of one row. A filter at its neutral value is skipped on that row.

    greedy: take the largest logit, draw no noise. reciprocal: binary32 1/temperature, neutral 1. top_k: neutral 2^31-1
    (any k >= the vocabulary is off). top_p: the integer P = top_p * 2^32, neutral 2^32. min_p: binary32, neutral 0.
    """

    greedy: bool = False
    reciprocal: float = 1.0
    top_k: int = TOP_K_OFF
    top_p: int = TOP_P_OFF
    min_p: float = 0.0


NEUTRAL = RowParams()
GREEDY = RowParams(greedy=True)
ROW_FIELDS = {
    "greedy": np.bool_,
    "reciprocal": np.float32,
    "top_k": np.int32,
    "top_p": np.uint64,
    "min_p": np.float32,
}
ROW_DTYPE = np.dtype(list(ROW_FIELDS.items()), align=True)


def resolve_row(
    temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None
) -> RowParams:
    """Round the shaping fields and decide greedy or not. Values are range-checked before (checks.py)."""
    t = np.float32(1.0 if temperature is None else temperature)
    p = TOP_P_OFF if top_p is None else round(top_p * 2.0**32)  # the product is exact; ties to even
    m = np.float32(0.0 if min_p is None else min_p)
    if m < SMALLEST_NORMAL:
        m = np.float32(0)
    silent = temperature is None and top_p is None and top_k is None and m == 0
    if silent or t < GREEDY_BELOW or top_k == 1 or p == 0 or m == 1:
        return GREEDY
    k = TOP_K_OFF if top_k is None or top_k <= 0 else min(top_k, TOP_K_OFF)
    return RowParams(False, float(np.float32(1) / t), k, p, float(m))


def stack_rows(rows: Sequence[RowParams]) -> npt.NDArray[Any]:
    """One structured array [R] of ROW_DTYPE for R rows."""
    return np.array(rows, dtype=ROW_DTYPE)


def seed_bits(seed: int) -> int:
    """A seed as 64 unsigned bits: -1 is the same seed as 2^64-1."""
    return seed & (2**64 - 1)
