"""SortedRow: what a filter sees, the tokens that are left, in the total order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.lots.mass import masses, scaled, weights


@dataclass(frozen=True, eq=False)
class SortedRow:
    """The tokens that are left of a row: larger logit first, equal logits by lower id. All arrays are read-only [N].

    ids: int64. logits: float32, after rewriting. scaled: float32, (logit - the largest of them) / temperature. weights:
    float32, exp(scaled), the first is 1. masses: uint64, weights * 2^40 rounded down; a token's probability is its mass
    by the sum of all. N >= 1, also given by `len`.

    A filter of one's own is a callable from a SortedRow to what stays: an int in 1 .. N, so many leading tokens, or a
    bool [N] that marks at least one. What is left is weighed anew, from its own largest logit, and goes to the next
    filter (docs/draw.md, 3). A filter that raises or returns anything else ends its own row with an error.
    """

    ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    scaled: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    masses: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mass(self) -> int:
        """Q: the sum of the masses."""
        return int(self.masses.sum(dtype=np.uint64))

    def first(self, length: int) -> SortedRow:
        """The first tokens; their weights stay what they are."""
        return SortedRow(*(array[:length] for array in self._arrays))

    def marked(self, chosen: npt.NDArray[Any], reciprocal: np.float32) -> SortedRow:
        """The tokens that a bool [N] marks, or those at these places, ascending; weighed anew."""
        return weigh(self.ids[chosen], self.logits[chosen], reciprocal)

    def copy(self) -> SortedRow:
        """The same in other arrays, read-only too: what is done to them does nothing to these."""
        copies = SortedRow(*(array.copy() for array in self._arrays))
        for array in copies._arrays:
            array.setflags(write=False)
        return copies

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.ids, self.logits, self.scaled, self.weights, self.masses


def weigh(ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32], reciprocal: np.float32) -> SortedRow:
    """Scale and weigh tokens in the total order, from the largest logit of theirs. ids, logits: [N], N > 0."""
    s = scaled(logits, logits[0], reciprocal)
    w = weights(s)
    row = SortedRow(ids, logits, s, w, masses(w))
    for array in row._arrays:
        array.setflags(write=False)
    return row
