"""Columns: what is known per slot. One declaration says dtype, neutral value and so the reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Column(NamedTuple):
    """One thing known per slot: its dtype and the value of a slot where nobody sits."""

    dtype: npt.DTypeLike
    neutral: Any


class Columns:
    """Arrays [num_slots] by name, all reset together, so that a new column cannot be forgotten on release."""

    def __init__(self, num_slots: int, declared: Mapping[str, Column]) -> None:
        self._declared = dict(declared)
        self._arrays = {name: np.empty(num_slots, column.dtype) for name, column in declared.items()}
        for index in range(num_slots):
            self.reset(index)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def write(self, index: int, **values: Any) -> None:
        """Write every column of a slot; one left out keeps its neutral value, an unknown one is an error."""
        for name, value in values.items():
            self._arrays[name][index] = value

    def reset(self, index: int) -> None:
        """Put the neutral values back into a slot."""
        for name, column in self._declared.items():
            self._arrays[name][index] = column.neutral
