"""Comparisons of 32 numbers at a time, against NumPy."""

import numpy as np
import pytest

from klero.device import HAVE_NUMBA

if not HAVE_NUMBA:
    pytest.skip("needs Numba", allow_module_level=True)

from klero.device import kernel
from klero.lots.mass.cpu import TINY
from klero.rows.lanes import bits_of, keys_at_least, lowest_bit, num_bits, words_at_most
from klero.rows.maxima.reference import signed_keys
from klero.rows.select.cpu import gather, unflushed
from klero.testing import assert_bits, nasty_rows


@kernel
def compare_keys(stored, begin, least):
    return keys_at_least(stored, begin, least)


@kernel
def compare_words(words, begin, most):
    return words_at_most(words, begin, most)


@kernel
def look_at(mask):
    return lowest_bit(mask), num_bits(mask)


@kernel
def widen(stored, out):
    for i in range(stored.size):
        out[i] = bits_of(stored[i])


@pytest.mark.parametrize("kind", [np.int16, np.uint16])
def test_every_half_is_read_as_the_float32_it_stands_for(kind):
    stored, out = np.arange(2**16).astype(np.uint16), np.empty(2**16, np.int32)
    widen(stored.view(kind), out)
    if kind is np.int16:
        right = stored.view(np.float16).astype(np.float32)
        quiet = np.isnan(right)  # which NumPy makes of signalling ones
        assert np.isnan(out[quiet].view(np.float32)).all()
        assert_bits(out[~quiet].view(np.float32), right[~quiet])
    else:
        assert_bits(out, (stored.astype(np.uint32) << 16).view(np.int32))


def bits(flags):
    """Flags as bits of an integer, the first one lowest."""
    return sum(1 << i for i, flag in enumerate(flags) if flag)


@pytest.mark.parametrize("seed", range(20))
def test_bit_j_tells_whether_key_j_is_large_enough(seed):
    row = nasty_rows(1, 45, seed)[0]
    keys = signed_keys(row)
    for least in [keys[3], keys[20] + 1, 0, -(2**31), 2**31 - 1]:
        got = compare_keys(row.view(np.int32), 7, np.int32(least))
        assert got == bits(keys[7:39] >= least)
    halves = (row.view(np.uint32) >> 16).astype(np.uint16)
    keys = signed_keys((halves.astype(np.uint32) << 16).view(np.float32))
    assert compare_keys(halves, 13, np.int32(keys[15])) == bits(keys[13:45] >= keys[15])
    with np.errstate(over="ignore"):
        halves = row.astype(np.float16)
    keys = signed_keys(halves.astype(np.float32))
    assert compare_keys(halves.view(np.int16), 13, np.int32(keys[15])) == bits(keys[13:45] >= keys[15])


def test_words_are_compared_without_a_sign():
    words = np.random.default_rng(1).integers(0, 2**32, 40, dtype=np.uint64).astype(np.uint32)
    words[:3] = 0, 2**31, 2**32 - 1
    for most in (0, 5, 2**31 - 1, 2**31, 2**32 - 1, int(words[9])):
        assert compare_words(words, 0, np.uint32(most)) == bits(words[:32] <= most)
        assert compare_words(words, 8, np.uint32(most)) == bits(words[8:40] <= most)


@pytest.mark.parametrize(("mask", "lowest", "number"), [(1, 0, 1), (2**31, 31, 1), (0b1011000, 3, 3), (0, 32, 0)])
def test_bits_of_a_mask(mask, lowest, number):
    assert look_at(np.uint32(mask)) == (lowest, number)


# keys of |l| < 2^-64 are those from -TINY to TINY - 1, and count as 0
@pytest.mark.parametrize(
    ("least", "bound"),
    [(TINY + 5, TINY + 5), (TINY, TINY), (1, TINY), (0, -TINY), (-1, -TINY), (-TINY, -TINY), (-TINY - 1, -TINY - 1)],
)
def test_a_bound_of_flushed_keys_as_one_of_unflushed_keys(least, bound):
    assert unflushed(np.int32(least)) == bound


@pytest.mark.parametrize("size", [1, 4, 31, 32, 33, 300])
def test_the_largest_number_that_is_flushed_counts_as_zero_on_both_sides(size):
    below = np.nextafter(np.float32(2.0**-64), np.float32(0))
    row = np.tile(np.array([below, -below, 2.0**-64, -(2.0**-64)], np.float32), 75)[:size]
    maxima, keys, ids = np.full(2, 2**31 - 1, np.int32), np.empty(300, np.int32), np.empty(300, np.int32)
    for least, kept in ((0, (0, 1, 2)), (1, (2,)), (-5, (0, 1, 2)), (-TINY - 1, (0, 1, 2, 3))):
        n = gather(row.view(np.int32), maxima[: -(-size // 256)], np.int32(least), keys, ids)
        assert ids[:n].tolist() == [i for i in range(size) if i % 4 in kept]
