"""Keys, weights and masses: against integers of Python, and kernel against reference."""

import numpy as np
import pytest

from klero.device import HAVE_NUMBA
from klero.lots.mass import canonical, lse, masses, ordered_keys, scaled, weights
from klero.lots.pinned import log32
from klero.testing import assert_bits, nasty_rows

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")


def some_weights():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 0x3F800001, 1_000_000, dtype=np.uint32).view(np.float32)
    near = np.float32(2.0**-40) * rng.integers(0, 70, 10_000).astype(np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1))])
    small = weights(-rng.uniform(0, 30, 1_000_000).astype(np.float32))
    return np.concatenate([bits, rng.random(1_000_000).astype(np.float32), near, small, np.float32([0, 1, 2.0**-126])])


@needs_numba
def test_mass_kernel_and_reference_agree_on_every_bit():
    from tests.lots import kernels

    w = some_weights()
    assert_bits(kernels.masses(w), masses(w))


def test_a_mass_is_the_floor_of_the_weight_in_units_of_two_to_the_minus_40():
    w = some_weights()[::500]
    assert masses(w).tolist() == [int(float(x) * 2**40) for x in w]  # a power of two: exact in binary64
    assert masses(np.float32([0, 1, 2.0**-40, 2.0**-41])).tolist() == [0, 2**40, 1, 0]


def test_tiny_logits_are_plus_zero_and_nothing_else_moves():
    tiny = np.array([0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x1F7FFFFF, 0x9F7FFFFF], np.uint32).view(np.float32)
    assert_bits(canonical(tiny), np.zeros(7, np.float32))
    kept = np.array([0x1F800000, 0x9F800000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF, 0xFF800000], np.uint32)
    assert_bits(canonical(kept.view(np.float32)), kept.view(np.float32))


def test_keys_order_as_logits_do():
    rows = canonical(nasty_rows(60, 300, 2, sound=True))
    for row in rows:
        keys = ordered_keys(row)
        a, b = np.random.default_rng(3).integers(0, row.size, (2, 5000))
        assert ((keys[a] > keys[b]) == (row[a] > row[b])).all()
        assert ((keys[a] == keys[b]) == (row[a] == row[b])).all()


def test_a_difference_that_overflows_weighs_nothing():
    s = scaled(np.float32([3.4e38, -3.4e38]), np.float32(3.4e38), np.float32(1))
    assert s.tolist() == [0, -np.inf]
    assert weights(s).tolist() == [1, 0]


def test_the_mass_of_the_widest_vocabulary_fits():
    assert int(masses(np.ones(2**22, np.float32)).sum(dtype=np.uint64)) == 2**62


def test_lse_is_the_logarithm_of_a_mass():
    for mass in (1, 2**40, 3 * 2**39, 2**53 + 1, 2**62, 123456789012345678):
        exact = np.log(mass / 2**40)
        assert abs(float(lse(mass)) - exact) <= 2.0**-22 * max(1, abs(exact))


def test_lse_rounds_a_mass_once():
    seen = 0
    for k in range(2**23, 2**23 + 400, 2):
        half = (2 * k + 1) << 38  # between the floats k and k + 1 times 2^39: to even is k
        low, high = (float(log32(np.float32(i * 2.0**39) * np.float32(2.0**-40))) for i in (k, k + 1))
        assert float(half + 1) == half  # binary64 cannot tell the two apart
        assert [float(lse(half)), float(lse(half + 1))] == [low, high]
        seen += low != high
    assert seen > 10
