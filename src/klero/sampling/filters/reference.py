"""Filters in NumPy on a sorted row: the definition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from klero.lots.mass import masses, ordered_keys
from klero.params import RowParams
from klero.params.row import TOP_P_OFF

F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def total_order(logits: F32) -> I64:
    """Return the ids of all tokens with l > -inf, larger logit first, lower id on a tie. logits: canonical [V]."""
    order = np.argsort(~ordered_keys(logits), kind="stable")
    return order[logits[order] > -np.inf]


def min_p(w: F32, threshold: np.float32) -> int:
    """Return how many leading tokens have w >= threshold. w: weights in the total order."""
    return int(np.count_nonzero(w >= threshold))


def needed_mass(mass: int, top_p: int) -> int:
    """max(1, ceil(P * Q / 2^32)), exact."""
    return max(1, -((-top_p * mass) >> 32))


def top_p(q: U64, top_p: int) -> int:
    """Return the length of the shortest prefix whose mass reaches the needed one. q: masses in the total order."""
    sums = np.cumsum(q)
    need = np.uint64(needed_mass(int(sums[-1]), top_p))  # a Python int would be compared through binary64
    return int(np.searchsorted(sums, need)) + 1


def cuts(w: F32, row: RowParams, vocab_size: int) -> Iterator[tuple[str, int]]:
    """Yield (filter, tokens left) for every filter that is not neutral, in order. w: weights in the total order."""
    left = len(w)
    if row.min_p > 0:
        left = min_p(w, np.float32(row.min_p))
        yield "min-p", left
    if row.top_k < vocab_size:
        left = min(left, row.top_k)
        yield "top-k", left
    if row.top_p < TOP_P_OFF:
        left = top_p(masses(w[:left]), row.top_p)
        yield "top-p", left
