"""Floors: what a row costs before anything is decided. klero's own kernels on the same rows.

read pass: every word is loaded and nothing decided; what memory gives, whoever reads. max pass: the largest key of
every block. mass pass: every weight by the pinned exp32, summed into 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from benchmarks.cases import Rows
from klero.rows.inputs import as_bits, read_logits
from klero.rows.maxima.cpu import BLOCK, block_maxima
from klero.rows.select.cpu import block_masses

FLOORS = ("read pass", "max pass", "mass pass")


@numba.njit(nogil=True, cache=True, error_model="numpy")
def read_pass(rows: Any) -> int:
    """The exclusive or of all words. rows: bits [R, V]."""
    found = 0
    for r in range(len(rows)):
        row, word = rows[r], rows[r, 0]
        for i in range(row.size):
            word ^= row[i]
        found += word
    return found


@numba.njit(nogil=True, cache=True, error_model="numpy")
def max_pass(rows: Any, maxima: Any) -> None:
    """Block maxima of all rows. rows: bits [R, V]; maxima: int32 [R, B], filled."""
    for r in range(len(rows)):
        block_maxima(rows[r], maxima[r])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def mass_pass(rows: Any, maxima: Any, largest: Any, reciprocal: Any, sums: Any) -> None:
    """Block masses of all rows. largest: float32 [R]; sums: uint64 [B], a scratch."""
    for r in range(len(rows)):
        block_masses(rows[r], maxima[r], largest[r], reciprocal, sums)


def floor_of(name: str, rows: Rows) -> Callable[[], object]:
    """A call that runs a floor over the rows once."""
    bits = as_bits(read_logits(rows.values).rows)  # what the kernels are given
    if name == "read pass":
        return lambda: read_pass(bits)
    num_blocks = -(-bits.shape[1] // BLOCK)
    maxima = np.empty((len(bits), num_blocks), np.int32)
    if name == "max pass":
        return lambda: max_pass(bits, maxima)
    max_pass(bits, maxima)
    largest, sums = rows.as_float32().max(axis=1), np.empty(num_blocks, np.uint64)
    return lambda: mass_pass(bits, maxima, largest, np.float32(1), sums)
