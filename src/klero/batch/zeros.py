"""Zeros: arrays by slot that are as wide as the longest history, of which most slots use little."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 1 << 21


def sparse_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Make an array of zeros, C order, that takes memory only for the small pages that were written.

    NumPy asks Linux for huge pages from 4 MB on: one number written would take 2 MB, the rows of many slots.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
