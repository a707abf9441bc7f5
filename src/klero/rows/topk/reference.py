"""Top-k in NumPy: the definition, a stable sort."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.lots.mass import canonical, ordered_keys

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def top(logits: F32, k: int) -> I64:
    """The ids of the k largest in the total order; -inf takes part, at the end. logits: canonical, without NaN."""
    return np.argsort(~ordered_keys(logits), kind="stable")[:k]


def top_rows(rows: F32, spans: I64, values: F32, ids: npt.NDArray[np.int32]) -> None:
    """Fill values and ids [R, k] from columns begin .. end-1 of each row."""
    for r, (begin, end) in enumerate(spans.tolist()):
        valid = rows[r, begin:end]
        if np.isnan(valid).any():
            values[r], ids[r] = np.nan, -1
            continue
        first = top(canonical(valid), values.shape[1])
        values[r], ids[r] = -np.inf, -1
        values[r, : len(first)], ids[r, : len(first)] = valid[first], begin + first
