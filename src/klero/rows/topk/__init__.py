"""Exact top-k, an op of its own: the first k tokens of each row in the total order (docs/draw.md, *Order*).

top_rows(rows [R, N], spans int64 [R, 2]) fills values float32 [R, k] and ids int32 [R, k] from columns begin .. end-1
of each row: a valid length and a window are both such a span. The kernel makes one pass of block maxima and then reads
only blocks that can matter, with the selection that the sampler's top-k is made of too (klero.rows.select).
list_top(row, maxima, k) is the same for one row, plain or a view; top lists of logprobs are made of it. Agreement:
*bits*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.device import Backend, choose_backend, first_use, num_threads, over_rows
from klero.errors import Fault, ParameterError
from klero.params.checks import Broken, as_integer
from klero.rows.inputs import as_bits, as_float32, read_logits
from klero.rows.topk import reference

__all__ = ["TopK", "topk"]


class TopK(NamedTuple):
    """The k largest of each of R rows, largest first; arrays live where the rows live.

    values: float32 [R, k], as they stand in the row. ids: int32 [R, k], columns of the whole row.
    """

    values: Any
    ids: Any


def topk(rows: Any, k: int, *, lengths: Any = None, windows: Any = None, backend: Backend = "auto") -> TopK:
    """Return the k largest values of each row and their columns, exactly, in the total order.

    The larger value comes first, at equal values the lower column; |l| < 2^-64 counts as 0, -0 is 0, +inf is first and
    -inf last. Values are given as they stand in the row, as float32, to which float16 and bfloat16 convert exactly.

    Args:
        rows: [R, N] float32, float16 or bfloat16, as for `klero.sample`: uint16 is read as bfloat16's bits. Read, never
            modified. R may be 0; N is at most 2^22. Rows are spread over threads, columns are not.
        k: an integer in [1, N].
        lengths: None, or int [R] in [0, N]: only the first lengths[r] columns of row r are valid.
        windows: None, or int [R, 2], 0 <= begin <= end <= N: only columns begin .. end-1 of row r are valid. Not beside
            lengths. Columns that are not valid are never looked at.
        backend: "auto", "cpu" (Numba) or "reference" (NumPy); the results are the same, bit for bit.

    Returns: TopK. Where a row has fewer than k valid columns, its last ids are -1, with -inf. A row with NaN in a valid
    column gets ids -1 and NaN throughout, and moves no bit of another row.

    Raises LogitsError, and ParameterError with all faults. Agreement of backends: *bits*.
    """
    given, home = read_logits(rows)
    num_rows, width = given.shape
    count, spans = _checked(k, lengths, windows, num_rows, width)
    values, ids = np.empty((num_rows, count), np.float32), np.empty((num_rows, count), np.int32)
    if choose_backend(backend) == "reference":
        reference.top_rows(as_float32(given), spans, values, ids)
    else:
        kernel, bits, into = cpu_kernel(), as_bits(given), values.view(np.int32)
        with first_use("top-k " + given.dtype.char):
            over_rows(lambda i, j: kernel(bits, width, spans, i, j, into, ids), num_rows, num_threads())
    return TopK(home(values), home(ids))


def cpu_kernel() -> Callable[..., Any]:
    """The Numba kernel; imported here, so that klero works where Numba cannot be imported."""
    from klero.rows.room import in_room
    from klero.rows.topk.cpu import top_rows

    return in_room(top_rows)


def _checked(k: Any, lengths: Any, windows: Any, num_rows: int, width: int) -> tuple[int, npt.NDArray[np.int64]]:
    """k, and the valid columns of each row, int64 [R, 2]; all faults at once."""
    faults = []
    try:
        count = as_integer(k, "")
    except Broken:
        count = 0
    if not 1 <= count <= width:
        faults.append(Fault("k", k, f"must be an integer in [1, {width}], the width of the rows"))
    spans = np.zeros((num_rows, 2), np.int64)
    spans[:, 1] = width
    if lengths is not None and windows is not None:
        rule = "stands beside lengths; give one of them (a length n is the window [0, n])"
        faults.append(Fault("windows", windows, rule))
    elif lengths is not None and not _fill(spans[:, 1], lengths, width):
        rule = f"must be an integer in [0, {width}] for each of the {num_rows} rows, or None"
        faults.append(Fault("lengths", lengths, rule))
    elif windows is not None and not (_fill(spans, windows, width) and (spans[:, 0] <= spans[:, 1]).all()):
        rule = f"must be [begin, end], 0 <= begin <= end <= {width}, for each of the {num_rows} rows, or None"
        faults.append(Fault("windows", windows, rule))
    if faults:
        raise ParameterError(faults)
    return count, spans


def _fill(out: npt.NDArray[np.int64], given: Any, most: int) -> bool:
    """Write integers in [0, most] to `out`; False where they are no such integers, or not as many."""
    try:
        array = np.asarray(given)
    except (ValueError, RuntimeError, TypeError):  # ragged lists; what a tensor library says of its own tensors
        return False
    if out.size == 0:
        return array.shape in (out.shape, (0,))
    if array.dtype.kind not in "iu" or array.shape != out.shape or array.min() < 0 or array.max() > most:
        return False
    out[...] = array
    return True
