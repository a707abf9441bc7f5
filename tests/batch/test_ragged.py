"""Ragged: values by slot as facts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from klero.batch.ragged import Ragged


def by_slot(ragged):
    """The values of every slot, as a kernel reads them."""
    return [ragged.flat[a:b].tolist() for a, b in zip(ragged.starts[:-1], ragged.starts[1:], strict=True)]


def test_values_lie_one_slot_after_the_other():
    ragged = Ragged(3, np.int32)
    assert (ragged.flat.tolist(), ragged.starts.tolist()) == ([], [0, 0, 0, 0])
    ragged.write(2, [7, 8, 9])
    ragged.write(0, [5])
    assert (ragged.flat.tolist(), ragged.starts.tolist()) == ([5, 7, 8, 9], [0, 1, 1, 4])
    ragged.write(2, [6])
    ragged.reset(0)
    assert (ragged.flat.tolist(), ragged.starts.tolist()) == ([6], [0, 0, 0, 1])


def test_kernels_get_the_declared_types_even_of_nothing():
    ragged = Ragged(2, np.float32)
    assert (ragged.flat.dtype, ragged.starts.dtype) == (np.float32, np.int64)
    ragged.write(1, [0.1])
    assert (ragged.flat.dtype, ragged.starts.dtype) == (np.float32, np.int64)
    assert ragged.flat[0] == np.float32(0.1)


def test_a_step_without_arrivals_and_departures_builds_nothing():
    ragged = Ragged(2, np.int32)
    ragged.write(0, [1, 2])
    flat, starts = ragged.flat, ragged.starts
    ragged.reset(1)  # it was empty
    assert ragged.flat is flat
    assert ragged.starts is starts
    ragged.reset(0)
    assert ragged.flat is not flat


def test_what_was_handed_out_stays_as_it_was():
    ragged = Ragged(2, np.int32)
    ragged.write(0, [1, 2])
    flat = ragged.flat
    ragged.write(0, [3])
    assert (flat.tolist(), ragged.flat.tolist()) == ([1, 2], [3])


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)), max_size=20))
def test_like_a_list_of_lists(writes):
    ragged, naive = Ragged(4, np.int32), [[], [], [], []]
    for index, values in writes:
        ragged.write(index, values)
        naive[index] = values
        assert by_slot(ragged) == naive
    ragged.reset(0)
    assert by_slot(ragged) == [[], *naive[1:]]
