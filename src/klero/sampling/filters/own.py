"""Filters of one's own: callables from a `SortedRow` to what stays of it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import STOPS, name_of, told
from klero.sampling.filters.sorted_row import SortedRow

Filter = Callable[[SortedRow], Any]
RULE = "it must return how many leading tokens stay, an int in 1 .. {n}, or a bool [{n}] that marks at least one"


class FilterFailed(Exception):
    """A filter raised, or returned what it may not; the text says which one and what."""


def keep_own(row: SortedRow, asked: Filter, reciprocal: np.float32) -> SortedRow:
    """Return what a filter leaves of a row, weighed anew. Raises FilterFailed."""
    try:
        returned = asked(row.copy())  # a filter may go as far as to write into read-only arrays
    except STOPS:
        raise
    except BaseException as error:  # a caller's code may raise anything (a panic of Rust too); its own row pays for it
        raise FilterFailed(f"filters: {name_of(asked)} raised {told(error)}") from error
    chosen = _chosen(returned, len(row))
    if chosen is None:
        shown = _shown(returned)
        raise FilterFailed(f"filters: {name_of(asked)} returned {shown}; {RULE.format(n=len(row))}")
    return row.marked(chosen, reciprocal)


def _shown(returned: Any) -> str:
    """A result in a few words, even if it cannot be printed."""
    try:
        return " ".join(reprlib.repr(returned).split())
    except Exception:
        return type(returned).__name__


def _chosen(returned: Any, length: int) -> npt.NDArray[Any] | None:
    """The places that stay, None where the result is none that a filter may return."""
    try:
        array = np.asarray(returned)
    except Exception:  # what cannot be an array, a ragged list for one, is no answer
        return None
    if array.ndim == 0 and array.dtype.kind in "iu":
        return np.arange(int(array)) if 1 <= int(array) <= length else None
    return array if array.dtype == np.bool_ and array.shape == (length,) and array.any() else None
