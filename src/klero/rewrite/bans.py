"""Bans: ids that must not be drawn. They come last, as -inf is a meaning and not a number: nothing may lift it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Bans(NamedTuple):
    """The bans of one row: the rule's name, for messages, and the ids (ascending, inside the vocabulary)."""

    rule: str
    ids: Sequence[int]


def rewrite_rows(rows: npt.NDArray[np.float32], bans_of_row: Sequence[Bans]) -> npt.NDArray[np.bool_]:
    """Write -inf to the banned ids of each row, in place, and return which rows were bad before that.

    rows: float32 [F, V], a copy of the model's rows. A row with NaN or +inf anywhere, banned ids included, is bad and
    must end with an error: a ban may not hide it.
    """
    bad = np.isnan(rows).any(axis=1) | (rows == np.inf).any(axis=1)
    for row, bans in zip(rows, bans_of_row, strict=True):
        row[list(bans.ids)] = -np.inf
    return np.asarray(bad)
