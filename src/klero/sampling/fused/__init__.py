"""The fused pass: rows of logits and their parameters in; token, status and number of kept tokens out.

sample_rows(rows [R, V], chosen int64, params [R] of ROW_DTYPE, seeds u64 [R], positions u32 [R], children u32 [R])
fills token_ids int32 [R], status uint8 [R] (klero.sampling.status) and num_kept int32 [R] at the chosen rows. A bad row
(NaN, +inf) or an empty one (all -inf) gets token -1 and kept 0, and moves no bit of another row. Greedy rows keep 1.
`sample_rewritten_rows` does the same after rules and masks, and `sample_scored_rows` also writes what `Asks` wants into
`Said` (klero.logprobs), without moving a token. rows are read, never written. Agreement: *token* and *set*; both are
exact functions of the bits of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def cpu_kernel() -> Callable[..., Any]:
    """The Numba kernel; imported here, so that klero works where Numba cannot be imported."""
    from klero.sampling.fused.cpu import sample_rows

    return sample_rows


def rewriting_kernel() -> Callable[..., Any]:
    """The Numba kernel for rows that rules rewrite."""
    from klero.sampling.fused.rewritten import sample_rewritten_rows

    return sample_rewritten_rows


def scoring_kernel() -> Callable[..., Any]:
    """The Numba kernel for rows that want more than a token."""
    from klero.sampling.fused.scored import sample_scored_rows

    return sample_scored_rows
