"""RowParams: what the shaping fields come to for one row, rounded once, on the host (docs/draw.md, 1).

This is the single truth about greedy or not: every path asks `resolve_row` and nobody decides for himself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TOP_K_OFF = 2**31 - 1
TOP_P_OFF = TYPICAL_P_OFF = XTC_THRESHOLD_OFF = 2**32
GREEDY_BELOW = np.float32(1e-6)
SMALLEST_NORMAL = np.float32(2.0**-126)


class RowParams(NamedTuple):
    """The rounded values of one row. A filter at its neutral value is skipped on that row.

    greedy: take the largest logit, draw no noise. reciprocal: binary32 1/temperature, neutral 1. top_k: neutral 2^31-1
    (any k >= the vocabulary is off). top_p: the integer P = top_p * 2^32, neutral 2^32. min_p: binary32, neutral 0.
    top_n_sigma: binary32, neutral 0. epsilon, top_a: integers of 2^32, neutral 0. eta: binary32, neutral 0.
    typical_p: an integer of 2^32, neutral 2^32. xtc_probability: binary32, neutral 0; xtc_threshold: an integer of
    2^32, which means something only where the probability is not 0.
    """

    greedy: bool = False
    reciprocal: float = 1.0
    top_k: int = TOP_K_OFF
    top_p: int = TOP_P_OFF
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    epsilon: int = 0
    eta: float = 0.0
    top_a: int = 0
    typical_p: int = TYPICAL_P_OFF
    xtc_threshold: int = XTC_THRESHOLD_OFF
    xtc_probability: float = 0.0


NEUTRAL = RowParams()
GREEDY = RowParams(greedy=True)
ROW_FIELDS = {
    "greedy": np.bool_,
    "reciprocal": np.float32,
    "top_k": np.int32,
    "top_p": np.uint64,
    "min_p": np.float32,
    "top_n_sigma": np.float32,
    "epsilon": np.uint64,
    "eta": np.float32,
    "top_a": np.uint64,
    "typical_p": np.uint64,
    "xtc_threshold": np.uint64,
    "xtc_probability": np.float32,
}
ROW_DTYPE = np.dtype(list(ROW_FIELDS.items()), align=True)


def round_fraction(value: float) -> int:
    """A number in [0, 1] as an integer of 2^32, to nearest, ties to even; the product is exact."""
    return round(value * 2.0**32)


def resolve_row(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    *,
    others: RowParams = NEUTRAL,
    drawn: bool = False,
) -> RowParams:
    """Round the shaping fields and decide greedy or not. Values are range-checked before (checks.py).

    others: from `resolve_others`. drawn: something else breaks silence (a decay, filters of one's own).
    """
    t = np.float32(1.0 if temperature is None else temperature)
    m = _at_least_normal(min_p)
    unset = temperature is None and top_p is None and top_k is None and m == 0
    silent = unset and not drawn and others == NEUTRAL
    if silent or t < GREEDY_BELOW or top_k == 1 or m == 1:
        return GREEDY
    k = TOP_K_OFF if top_k is None or top_k <= 0 else min(top_k, TOP_K_OFF)
    row = others._replace(reciprocal=float(np.float32(1) / t), top_k=k, min_p=m)
    return with_top_p(row, TOP_P_OFF if top_p is None else round_fraction(top_p))


def with_top_p(row: RowParams, top_p: int) -> RowParams:
    """The row at P = top_p: greedy at 0, and where it is greedy for another reason."""
    if row.greedy or row.top_p == top_p:
        return row
    return row._replace(top_p=top_p) if top_p > 0 else GREEDY


def resolve_others(
    top_n_sigma: float | None = None,
    epsilon_cutoff: float = 0,
    eta_cutoff: float = 0,
    top_a: float = 0,
    typical_p: float = 1,
    xtc_probability: float = 0,
    xtc_threshold: float = 0,
) -> RowParams:
    """Round the filters beside top-k, top-p and min-p; a row that is neutral in everything else.

    A top_n_sigma above 0 never becomes 0, which would be off. An xtc_threshold above 0.5 makes XTC neutral: two tokens
    cannot both reach it.
    """
    sigma = 0.0 if top_n_sigma is None or top_n_sigma <= 0 else max(float(np.float32(top_n_sigma)), 2.0**-126)
    probability = _at_least_normal(xtc_probability) if xtc_threshold <= 0.5 else 0.0
    return RowParams(
        top_n_sigma=sigma,
        epsilon=round_fraction(epsilon_cutoff),
        eta=_at_least_normal(eta_cutoff),
        top_a=round_fraction(top_a),
        typical_p=round_fraction(typical_p),
        xtc_threshold=round_fraction(xtc_threshold) if probability > 0 else XTC_THRESHOLD_OFF,
        xtc_probability=probability,
    )


def bytes_of_row(row: RowParams) -> bytes:
    """One row as it stands in an array of ROW_DTYPE."""
    array = np.zeros(1, ROW_DTYPE)  # what lies between the fields is the same each time
    array[0] = row
    return array.tobytes()


def rows_of_bytes(rows: Sequence[bytes], num_rows: int) -> npt.NDArray[Any]:
    """The array [R] of R such rows, or of one for all of them; its memory is its own."""
    joined = b"".join(rows) if len(rows) == num_rows else rows[0] * num_rows
    return np.ndarray(num_rows, ROW_DTYPE, bytearray(joined))


def seed_bits(seed: int) -> int:
    """A seed as 64 unsigned bits: -1 is the same seed as 2^64-1."""
    return seed & (2**64 - 1)


def _at_least_normal(value: float | None) -> float:
    """The value as a binary32, 0 where it is below 2^-126 or not asked."""
    rounded = np.float32(0 if value is None else value)
    return float(rounded) if rounded >= SMALLEST_NORMAL else 0.0
