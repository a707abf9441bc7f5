"""The fused pass: rows of logits and their parameters in; token, status and number of kept tokens out.

sample_rows(rows [R, V], width, chosen int64, params [R] of ROW_DTYPE, seeds u64 [R], positions u32 [R], children u32
[R]) fills token_ids int32 [R], status uint8 [R] (klero.sampling.status) and num_kept int32 [R] at the chosen rows. A
bad row (NaN, +inf) or an empty one (all -inf) gets token -1 and kept 0, and moves no bit of another row. Greedy rows
keep 1. `sample_rewritten_rows` does the same after rules and masks, and `sample_scored_rows` also writes what `Asks`
wants into `Said` (klero.logprobs), without moving a token; `sample_wide` samples one row on several threads. rows are
read, never written. Agreement: *token* and *set*; both are exact functions of the bits of the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def cpu_kernel() -> Callable[..., Any]:
    """The Numba kernel; imported here, so that klero works where Numba cannot be imported."""
    from klero.rows.room import in_room
    from klero.sampling.fused.cpu import sample_rows

    return in_room(sample_rows)


@functools.cache
def rewriting_kernel() -> Callable[..., Any]:
    """The Numba kernel for rows that rules rewrite."""
    from klero.rows.room import in_room
    from klero.sampling.fused.rewritten import sample_rewritten_rows

    return in_room(sample_rewritten_rows)


@functools.cache
def scoring_kernel() -> Callable[..., Any]:
    """The Numba kernel for rows that want more than a token."""
    from klero.rows.room import in_room
    from klero.sampling.fused.scored import sample_scored_rows

    return in_room(sample_scored_rows)


@functools.cache
def wide_kernel() -> Callable[..., Any]:
    """The same for one row, on several threads: (rows, width, r, ..., threads)."""
    from klero.sampling.fused.split import sample_wide

    return sample_wide
