"""Masks: which tokens R rows allow, of the rows that have a mask at all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


class Masks(NamedTuple):
    """Masks of R rows. words: int32 [M, ceil(V / 32)]; of_row: int32 [R], the mask of each row, -1 where none.

    Token i is allowed where bit i & 31 of word i >> 5 is 1.
    """

    words: I32
    of_row: I32

    @classmethod
    def none(cls, num_rows: int, num_tokens: int) -> Masks:
        """No row has one."""
        of_row = np.empty(num_rows, np.int32)
        of_row.fill(-1)  # in each step; np.full takes three times as long
        return cls(np.empty((0, words_of(num_tokens)), np.int32), of_row)

    @classmethod
    def given(cls, words: I32) -> Masks:
        """One mask a row, [R, W]; a row that allows everything has none."""
        rows = np.arange(len(words), dtype=np.int32)
        return cls(words, np.where((words != -1).any(axis=1), rows, np.int32(-1)))

    def row(self, r: int) -> I32 | None:
        """The mask of a row; None: it has none."""
        m = int(self.of_row[r])
        return None if m < 0 else self.words[m]

    def joined(self, other: Masks) -> Masks:
        """What both allow; a row that one of them says nothing about is the other's."""
        if (other.of_row < 0).all():
            return self
        if (self.of_row < 0).all():
            return other
        theirs = np.flatnonzero(other.of_row >= 0)
        words, of_row = other.words[other.of_row[theirs]], self.of_row.copy()
        both = self.of_row[theirs] >= 0
        words[both] &= self.words[self.of_row[theirs[both]]]
        of_row[theirs] = len(self.words) + np.arange(len(theirs), dtype=np.int32)
        return Masks(np.concatenate([self.words, words]), of_row)


def words_of(num_tokens: int) -> int:
    """How many words hold a bit for each token."""
    return -(-num_tokens // 32)
