"""Arrays of zeros that cost what was written."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from klero.batch.zeros import sparse_zeros

PAGE = 4096


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1, 1), (3, 5), (2, 1 << 18), (3, 1 << 18), (7, 262147)])
def test_an_array_like_any_other(shape):
    array = sparse_zeros(shape, np.int32)
    assert (array.shape, array.dtype) == (shape, np.int32)
    assert array.flags.carray
    assert not array.any()
    array[...] = 7
    assert (array == 7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_number_in_each_of_256_wide_rows_takes_256_small_pages():
    before = resident()
    array = sparse_zeros((256, 131072), np.int32)  # 134 MB; with huge pages all of it would be there
    array[:, 5] = 1
    assert resident() - before < 8e6
