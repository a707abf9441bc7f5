"""Ragged: a few numbers per slot, of another length in each, flat for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Ragged:
    """Values by slot: those of slot s are flat[starts[s]:starts[s + 1]].

    starts: int64 [S + 1]. flat: dtype [N]. Both are laid out anew after a write or reset, when somebody asks, so that a
    step without arrivals and departures builds nothing.
    """

    def __init__(self, num_slots: int, dtype: npt.DTypeLike) -> None:
        self._empty = np.empty(0, dtype)
        self._values = [self._empty] * num_slots
        self._flat, self._starts = self._empty, np.zeros(num_slots + 1, np.int64)
        self._stale = False

    def write(self, index: int, values: npt.ArrayLike) -> None:
        """Set the values of a slot."""
        self._values[index] = np.array(
            values, self._empty.dtype
        )  # a copy: what is laid out later must be what was written
        self._stale = True

    def reset(self, index: int) -> None:
        """Empty a slot."""
        if len(self._values[index]):
            self.write(index, self._empty)

    @property
    def flat(self) -> npt.NDArray[Any]:
        """The values of all slots, one slot after the other."""
        self._lay_out()
        return self._flat

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where the values of each slot begin; the last entry is their number."""
        self._lay_out()
        return self._starts

    def _lay_out(self) -> None:
        if self._stale:
            self._flat = np.concatenate(self._values)
            self._starts = np.zeros(len(self._values) + 1, np.int64)
            np.cumsum([len(values) for values in self._values], out=self._starts[1:])
            self._stale = False
