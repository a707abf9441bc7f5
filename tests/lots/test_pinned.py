"""exp32 and log32: kernel and reference on every bit, how exact they are, and that exp32 is monotone."""

import numpy as np
import pytest

from klero.device import HAVE_NUMBA
from klero.lots.pinned import exp32, log32
from klero.testing import assert_bits

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
MINUS_ZERO, MINUS_87_5, MINUS_INF = 0x80000000, 0xC2AF0000, 0xFF800000


def between(first_bits, last_bits, count, seed):
    """Random floats whose bits lie in a range, both ends among them."""
    bits = np.random.default_rng(seed).integers(first_bits, last_bits + 1, count, dtype=np.uint64)
    bits[:2] = first_bits, last_bits
    return bits.astype(np.uint32).view(np.float32)


def around(centres, reach=64):
    """Each centre (float32) with its neighbours on both sides, as runs [N, 2 * reach + 1] of rising bits."""
    bits = np.asarray(centres, np.float32).view(np.uint32).astype(np.int64)[:, None]
    return (bits + np.arange(-reach, reach + 1)).astype(np.uint32).view(np.float32)


STEPS = around([(n + half) * np.log(2) for n in range(-126, 0) for half in (0, 0.5)])
"""Where n changes, and where r is 0."""
BORDERS = around([-87.0, -86.99, -26.01, -1.0, -2.0**-24, -2.0**-64, -2.0**-125])


def exp_inputs():
    return np.concatenate(
        [
            between(MINUS_ZERO, MINUS_87_5, 1_500_000, 1),
            between(MINUS_ZERO, MINUS_INF, 500_000, 2),
            -np.random.default_rng(3).uniform(0, 88, 1_500_000).astype(np.float32),
            STEPS[STEPS < 0],
            BORDERS.ravel(),
            np.array([0.0, -0.0, -np.inf, -3.4e38, -1e-45], np.float32),
        ]
    )


@needs_numba
def test_exp32_kernel_and_reference_agree_on_every_bit():
    from tests.lots import kernels

    x = exp_inputs()
    assert_bits(kernels.exp32(x), exp32(x))


def test_exp32_is_within_two_units_of_the_last_place():
    x = exp_inputs()
    x = x[x >= -87]
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exp32(x) / exact - 1)).max() < 2 * 2.0**-23


def test_exp32_of_zero_is_one_and_below_87_is_zero():
    x = np.array([0.0, -0.0, -87.0, np.nextafter(np.float32(-87), np.float32(-88)), -100, -np.inf], np.float32)
    y = exp32(x)
    assert_bits(y[[0, 1, 3, 4, 5]], np.array([1, 1, 0, 0, 0], np.float32))
    assert y[2] > 0


def assert_never_falls(y, what):
    """y rises, or stays, along the last axis from the right to the left: x falls with its rising bits."""
    assert (np.diff(y, axis=-1) <= 0).all(), what


def test_exp32_is_monotone_around_every_step_and_border():
    for runs in (STEPS, BORDERS):
        assert_never_falls(exp32(np.minimum(runs, np.float32(0))), "neighbours")


def test_exp32_is_monotone_along_random_neighbours_and_far_apart():
    starts = between(MINUS_ZERO + 64, MINUS_87_5, 20_000, 4)
    assert_never_falls(exp32(around(starts, 32)), "neighbours")
    x = exp_inputs()
    assert_never_falls(exp32(np.sort(x)[::-1]), "sorted")


def test_exp32_stays_in_the_unit_interval():
    y = exp32(exp_inputs())
    assert y.min() >= 0
    assert y.max() == 1


@pytest.mark.deep
@needs_numba
def test_exp32_on_every_float_from_minus_zero_to_minus_87_5():
    from tests.lots import kernels

    last = np.float32(1)
    for begin in range(MINUS_ZERO, MINUS_87_5 + 1, 2**22):
        x = np.arange(begin, min(begin + 2**22, MINUS_87_5 + 1), dtype=np.uint32).view(np.float32)
        y = kernels.exp32(x)
        assert_bits(y, exp32(x), f"bits from {begin:#x}")
        assert y[0] <= last, f"bits from {begin:#x}"
        assert_never_falls(y, f"bits from {begin:#x}")
        last = y[-1]


def log_inputs():
    smallest, largest = 0x00800000, 0x7F7FFFFF
    return np.concatenate(
        [
            between(smallest, largest, 2_000_000, 5),
            np.random.default_rng(6).uniform(2.0**-33, 1, 1_000_000).astype(np.float32),
            around([2.0**e * m for e in range(-100, 100) for m in (1, np.sqrt(0.5))]).ravel(),
        ]
    )


@needs_numba
def test_log32_kernel_and_reference_agree_on_every_bit():
    from tests.lots import kernels

    x = log_inputs()
    assert_bits(kernels.log32(x), log32(x))


def test_log32_is_near_the_exact_logarithm():
    x = log_inputs()
    exact = np.log(x.astype(np.float64))
    assert (np.abs(log32(x) - exact) <= 2.0**-23 * np.maximum(np.abs(exact), 2.0**-23)).all()


@pytest.mark.deep
@needs_numba
def test_log32_on_every_mantissa_of_many_exponents():
    from tests.lots import kernels

    for exponent in range(1, 255, 7):
        x = np.arange(exponent << 23, (exponent + 1) << 23, dtype=np.uint32).view(np.float32)
        assert_bits(kernels.log32(x), log32(x), f"exponent {exponent}")
