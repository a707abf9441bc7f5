"""Columns: what is known per slot. One declaration says dtype, shape and neutral value, and so the reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch.zeros import sparse_zeros


class Column(NamedTuple):
    """One thing known per slot: dtype, the value of a slot where nobody sits, and shape if it is no number."""

    dtype: npt.DTypeLike
    neutral: Any
    shape: tuple[int, ...] = ()


class Columns:
    """Arrays [num_slots, *shape] by name, all reset together, so that a new column cannot be forgotten on release."""

    def __init__(self, num_slots: int, declared: Mapping[str, Column]) -> None:
        self._declared = dict(declared)
        self._arrays = {name: _neutral(num_slots, column) for name, column in declared.items()}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def write(self, index: int, **values: Any) -> None:
        """Write columns of a slot; one left out keeps what it has, an unknown one is an error."""
        for name, value in values.items():
            self._arrays[name][index] = value

    def reset(self, index: int) -> None:
        """Put the neutral values back into a slot."""
        for name, column in self._declared.items():
            self._arrays[name][index] = column.neutral


def _neutral(num_slots: int, column: Column) -> npt.NDArray[Any]:
    """The array of a column where nobody sits yet. A wide one of zeros takes memory only where it is written."""
    if not column.shape:
        return np.full(num_slots, column.neutral, column.dtype)
    array = sparse_zeros((num_slots, *column.shape), column.dtype)
    if column.neutral != 0:
        array[:] = column.neutral
    return array
