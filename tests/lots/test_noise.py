"""Lots: kernel and reference on every bit, and the bounds that docs/draw.md states in section 4."""

import numpy as np
import pytest

from klero.device import HAVE_NUMBA
from klero.lots.noise import COIN, DRAFT, DRAW, lot_of_word, lots_of_ids, uniform
from klero.lots.pinned import core, log32
from klero.testing import assert_bits

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")

BRANCH = int(0.29289322 * 2**32)  # where core(-v, 0) gives way to core(1 - 2v, -1)
BORDERS = (0, BRANCH, 2**31, 2**32 - 1)
LARGEST, SMALLEST = np.float32(22.873857), np.float32(-3.1299946)


def walk(centre, reach):
    """All words around a centre, rising."""
    return np.arange(max(centre - reach, 0), min(centre + reach, 2**32 - 1) + 1, dtype=np.uint64).astype(np.uint32)


def words():
    rng = np.random.default_rng(7)
    few_bits = rng.integers(0, 2**32, 500_000, dtype=np.uint32) >> rng.integers(0, 32, 500_000, dtype=np.uint32)
    walks = [walk(centre, 2**16) for centre in BORDERS]
    powers = [walk(2**k, 300) for k in range(1, 32)]
    return np.concatenate([rng.integers(0, 2**32, 2_000_000, dtype=np.uint32), few_bits, ~few_bits, *walks, *powers])


def exact_lots(x):
    """-ln(-ln(1 - (x + 0.5)/2^32)) in binary64, without cancellation at either end."""
    x = x.astype(np.float64)
    low = np.log1p(-(np.minimum(x, 2.0**31) + 0.5) / 2**32)
    high = np.log((2.0**32 - np.maximum(x, 2.0**31) - 0.5) / 2**32)
    return -np.log(-np.where(x < 2**31, low, high))


def leading_zeros(x):
    return 32 - np.ceil(np.log2(x.astype(np.float64) + 1)).astype(np.int64)


def assert_bounds(x, g):
    assert g.min() >= SMALLEST
    assert g.max() <= LARGEST
    assert (g <= (leading_zeros(x) + 1) * 0.693148).all()
    exact = exact_lots(x)
    assert (np.abs(g - exact) <= 2e-7 * np.maximum(1, np.abs(g))).all()


def lots_with_branch_at(bits, x):
    """The lots of docs/draw.md, section 4, written out; the border of the two lower branches is at the given bits."""
    half, unit, one = np.float32(0.5), np.float32(2.0**-32), np.float32(1)
    border = np.array([bits], np.uint32).view(np.float32)[0]
    upper = x >= 2**31
    v = (np.where(upper, ~x, x).astype(np.float32) + half) * unit
    near, far = core(-v, np.zeros_like(v)), core(one - (v + v), np.full_like(v, -1))
    return -log32(-np.where(upper, log32(v), np.where(v < border, near, far)))


def test_the_branches_are_where_the_text_has_them():
    x = np.concatenate([words(), np.random.default_rng(10).integers(2**29, 2**31, 500_000, dtype=np.uint32)])
    assert_bits(lot_of_word(x), lots_with_branch_at(0x3E95F61A, x))
    for other in (0x3E95F61A - 0x8000, 0x3E95F61A + 0x8000):  # the border matters to the last bits, a little off it
        assert (lots_with_branch_at(other, x) != lot_of_word(x)).any()


@needs_numba
def test_kernel_and_reference_agree_on_every_bit():
    from tests.lots import kernels

    x = words()
    assert_bits(kernels.lot_of_word(x), lot_of_word(x))


def test_bounds_on_random_and_extreme_words():
    x = words()
    assert_bounds(x, lot_of_word(x))


@needs_numba
def test_the_kernel_has_a_bound_that_no_lot_passes():
    from tests.lots import kernels

    x = words()
    g, bound = lot_of_word(x), kernels.bound_of_word(x)
    assert (g <= bound).all()
    small = (x > 0) & (x < 2**30)
    assert (bound - g)[small].max() < 1.6  # and one that tells small words apart: two bits at most


def test_the_ends_are_reached():
    assert_bits(lot_of_word([0, 2**32 - 1]), np.array([LARGEST, SMALLEST]))


@pytest.mark.parametrize("centre", BORDERS)
def test_lots_never_rise_with_the_word_around_a_border(centre):
    assert (np.diff(lot_of_word(walk(centre, 2**20))) <= 0).all()


def test_lots_never_rise_with_the_word_anywhere_looked():
    assert (np.diff(lot_of_word(np.sort(words()))) <= 0).all()
    starts = np.random.default_rng(8).integers(0, 2**32 - 64, 20_000, dtype=np.uint64)
    runs = (starts[:, None] + np.arange(64, dtype=np.uint64)).astype(np.uint32)
    assert (np.diff(lot_of_word(runs), axis=-1) <= 0).all()


@pytest.mark.deep
@needs_numba
def test_every_word():
    from tests.lots import kernels

    last = LARGEST
    for begin in range(0, 2**32, 2**23):
        x = np.arange(begin, begin + 2**23, dtype=np.uint64).astype(np.uint32)
        g = kernels.lot_of_word(x)
        what = f"words from {begin:#x}"
        assert g[0] <= last, what
        assert (g[1:] <= g[:-1]).all(), what
        assert (g <= kernels.bound_of_word(x)).all(), what
        if begin % 2**27 == 0 or begin >= 2**32 - 2**24:  # binary64 is slow: a part of them
            assert_bounds(x, g)
            assert_bits(g, lot_of_word(x), what)
        last = g[-1]
    assert last == SMALLEST


@needs_numba
@pytest.mark.parametrize("purpose", range(5))
def test_lots_of_ids_agree_with_the_kernel(purpose):
    from tests.lots import kernels

    ids = np.random.default_rng(9).integers(0, 2**22, 50_000)
    for seed, position, child in [(0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (0x123456789ABCDEF0, 77, 3)]:
        at = seed, position, child, purpose
        assert_bits(kernels.lots_of_ids(ids, *at), lots_of_ids(ids, *at))
        assert_bits(kernels.uniform(*at), uniform(*at))


def test_a_lot_belongs_to_its_token_whatever_is_asked_beside_it():
    whole = lots_of_ids(np.arange(1000), 5, 6, 7)
    some = np.array([999, 3, 3, 0, 514])
    assert_bits(lots_of_ids(some, 5, 6, 7), whole[some])
    assert_bits(lots_of_ids([514], 5, 6, 7)[0], whole[514])


def test_purposes_have_lots_of_their_own():
    ids = np.arange(256)
    lots = [lots_of_ids(ids, 5, 6, 7, purpose) for purpose in range(5)]
    assert [DRAW, DRAFT, COIN] == [0, 3, 4]
    for i in range(5):
        for j in range(i):
            assert np.count_nonzero(lots[i] == lots[j]) < 3


def test_uniform_is_above_zero_and_one_occurs():
    from klero.lots.noise.reference import unit

    u = unit(np.array([0, 1, 2**31, 2**32 - 129, 2**32 - 1], np.uint32))
    assert (u > 0).all()
    assert_bits(u[[0, 4]], np.array([2.0**-33, 1.0], np.float32))
