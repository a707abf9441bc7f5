"""Custom per-request processors: callables that see the tokens so far and the row, and change the row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.errors import STOPS, name_of, told
from klero.rewrite.context import Context

F32 = npt.NDArray[np.float32]


def process(row: F32, at: Context) -> tuple[F32, str | None]:
    """Call the processors in order, each as `processor(token_ids, row)`: (row after them, what went wrong or None).

    token_ids: int32, prompt and output, a copy, real ids only. row: float32 [V] after changes and bans, a copy that the
    processor may write to. It returns a row [V], or None for what it wrote in place. A token that is -inf before stays
    so. An exception, a wrong shape, NaN or +inf is an error of this row alone.
    """
    banned = np.isneginf(row)
    for processor in at.params.logits_processors:
        name, given = name_of(processor), row.copy()
        try:
            returned = processor(at.history.copy(), given)
            array = np.asarray(given if returned is None else returned)
            after = np.array(array, np.float32) if array.dtype.kind in "fiu" else None
        except STOPS:
            raise
        except BaseException as error:  # a caller's code may raise anything (a panic of Rust too); its row pays for it
            return row, f"logits_processors: {name} raised {told(error)}"
        if after is None:
            return row, f"logits_processors: {name} returned {array.dtype}; it must return real numbers"
        if after.shape != row.shape:
            return row, f"logits_processors: {name} returned shape {after.shape}; it must return a row {row.shape}"
        after[banned] = -np.inf
        if np.isnan(after).any() or np.isposinf(after).any():
            return row, f"logits_processors: {name} wrote NaN or +inf; write -inf to ban and finite numbers else"
        row = after
    return row, None
