"""Grades of agreement: bits, set, token. Each failure names the first difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BITS_OF_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def assert_bits(a: npt.ArrayLike, b: npt.ArrayLike, what: str = "values") -> None:
    """Raise AssertionError unless a and b agree in dtype, shape and every bit; NaN equals itself, -0 is not +0.

    a, b: arrays of any shape with items of 1, 2, 4 or 8 bytes. what: a name for the message.
    """
    first, second = np.asarray(a), np.asarray(b)
    if first.dtype != second.dtype or first.shape != second.shape:
        raise AssertionError(
            f"{what}: {first.dtype} {first.shape} against {second.dtype} {second.shape}; bits need one dtype and shape"
        )
    bits_a, bits_b = _bits(first), _bits(second)
    different = np.flatnonzero(bits_a != bits_b)
    if different.size:
        i = int(different[0])
        index = tuple(int(part) for part in np.unravel_index(i, first.shape))
        width = 2 * first.dtype.itemsize
        raise AssertionError(
            f"{what}: {different.size} of {first.size} differ, first at {index}: "
            f"{first.flat[i]!r} ({int(bits_a[i]):0{width}x}) against {second.flat[i]!r} ({int(bits_b[i]):0{width}x})"
        )


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1).view(BITS_OF_SIZE[array.dtype.itemsize])


def assert_set(kept_a: npt.ArrayLike, kept_b: npt.ArrayLike, what: str = "kept") -> None:
    """Raise AssertionError unless both hold the same token ids; their order does not matter, a repeated id does."""
    first, second = _ids(kept_a, what), _ids(kept_b, what)
    only_a, only_b = np.setdiff1d(first, second), np.setdiff1d(second, first)
    if only_a.size or only_b.size:
        raise AssertionError(
            f"{what}: {first.size} tokens against {second.size}; "
            f"only in the first: {_some(only_a)}; only in the second: {_some(only_b)}"
        )


def _ids(kept: npt.ArrayLike, what: str) -> npt.NDArray[np.int64]:
    ids = np.sort(np.asarray(kept, dtype=np.int64).reshape(-1))
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if repeated.size:
        raise AssertionError(f"{what}: token {int(repeated[0])} is there more than once")
    return ids


def _some(ids: npt.NDArray[np.int64]) -> str:
    shown = ", ".join(str(i) for i in ids[:5].tolist())
    return (shown or "none") + (f" and {ids.size - 5} more" if ids.size > 5 else "")


def assert_token(a: npt.ArrayLike, b: npt.ArrayLike, what: str = "tokens") -> None:
    """Raise AssertionError unless the tokens of all rows are equal. a, b: integers of one shape, any integer dtype."""
    first, second = np.asarray(a), np.asarray(b)
    if first.dtype.kind not in "iu" or second.dtype.kind not in "iu":
        raise AssertionError(f"{what}: {first.dtype} against {second.dtype}; tokens are integers")
    if first.shape != second.shape:
        raise AssertionError(f"{what}: shape {first.shape} against {second.shape}")
    different = np.argwhere(first != second)
    if len(different):
        index = tuple(int(part) for part in different[0])
        raise AssertionError(
            f"{what}: {len(different)} of {first.size} rows differ, first at {index}: "
            f"{int(first[index])} ({int(first[index]):#x}) against {int(second[index])} ({int(second[index]):#x})"
        )
