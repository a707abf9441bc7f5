"""klero.testing itself: the helpers see what they should and pass what they should."""

import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.testing import (
    ROW_KINDS,
    assert_bits,
    assert_draws,
    assert_set,
    assert_token,
    chi_square_tail,
    distribution,
    goodness_of_fit,
    nasty_params,
    nasty_row,
    nasty_rows,
)


def test_bits_tell_zeros_apart_and_take_nan_as_itself():
    a = np.float32([[1, 2], [np.nan, -0.0]])
    assert_bits(a, a.copy())
    with pytest.raises(AssertionError, match=r"lots: 1 of 4 differ, first at \(1, 1\): .*\(80000000\).*\(00000000\)"):
        assert_bits(a, np.float32([[1, 2], [np.nan, 0.0]]), "lots")
    other = a.copy()
    other.view(np.uint32)[1, 0] = 0xFFC00000
    with pytest.raises(AssertionError, match=r"\(1, 0\): .*\(7fc00000\) .*\(ffc00000\)"):
        assert_bits(a, other)


@pytest.mark.parametrize("other", [np.float64([1, 2]), np.float32([[1, 2]]), np.float32([1]), np.int32([1, 2])])
def test_bits_need_one_dtype_and_shape(other):
    with pytest.raises(AssertionError, match="one dtype and shape"):
        assert_bits(np.float32([1, 2]), other)


def test_bits_of_every_width_and_layout():
    for dtype in (np.int8, np.float16, np.uint32, np.float64, np.int64, bool):
        a = np.arange(12).reshape(3, 4).astype(dtype)
        assert_bits(a, np.asfortranarray(a))
        with pytest.raises(AssertionError, match=r"first at \(0, 0\)"):
            assert_bits(a, a == 0 if dtype is bool else a + np.ones((), dtype))
    assert_bits(np.float32(1), np.float32(1))
    with pytest.raises(AssertionError, match=r"first at \(\)"):
        assert_bits(np.float32(1), np.float32(2))
    assert_bits([], [])


def test_sets():
    assert_set([3, 1, 2], np.array([1, 2, 3]))
    with pytest.raises(AssertionError, match=r"2 tokens against 3; only in the first: 9; only in the second: 1, 2"):
        assert_set([9, 3], [1, 2, 3])
    with pytest.raises(AssertionError, match="token 3 is there more than once"):
        assert_set([3, 3], [3])
    with pytest.raises(AssertionError, match="0, 1, 2, 3, 4 and 95 more"):
        assert_set(range(100), [])


def test_tokens():
    assert_token(np.int32([1, 2]), np.int64([1, 2]))
    with pytest.raises(AssertionError, match=r"1 of 2 rows differ, first at \(1,\): 2 \(0x2\) against -1 \(-0x1\)"):
        assert_token([1, 2], [1, -1])
    for wrong in ([1], [[1, 2]], [1.0, 2.0], [True, False]):
        with pytest.raises(AssertionError):
            assert_token([1, 2], wrong)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 10, 63, 256, 999, 5001])
def test_the_tail_of_chi_square_is_exact(degrees):
    stats = pytest.importorskip("scipy.stats")
    far = degrees + 8 * np.sqrt(2 * degrees)
    for statistic in (1e-9, 0.1, 1, degrees / 2, degrees, 1.3 * degrees, far, 3.0 * degrees):
        right = stats.chi2.sf(statistic, degrees)
        assert chi_square_tail(float(statistic), degrees) == pytest.approx(right, rel=1e-9, abs=1e-300)


def test_the_ends_of_the_tail():
    assert chi_square_tail(0, 3) == chi_square_tail(-1e-12, 3) == 1
    assert chi_square_tail(1e9, 3) == chi_square_tail(float("inf"), 3) == 0
    for statistic, degrees in ((1.0, 0), (float("nan"), 2)):
        with pytest.raises(ValueError, match="degrees"):
            chi_square_tail(statistic, degrees)


def test_p_values_of_right_draws_are_uniform():
    rng = np.random.default_rng(1)
    for p in (np.full(10, 0.1), np.array([0.7, 0.2, 0.05, 0.03, 0.02]), rng.dirichlet(np.ones(300))):
        values = np.array([goodness_of_fit(rng.multinomial(20_000, p), p) for _ in range(400)])
        for level in (0.01, 0.1, 0.5):
            hits = (values < level).sum()
            assert abs(hits - 400 * level) < 5 * np.sqrt(400 * level * (1 - level)) + 1


def test_impossible_tokens_and_rare_ones():
    assert goodness_of_fit([10, 1, 0], [0.5, 0.0, 0.5]) == 0
    assert goodness_of_fit([10, 0], [1.0, 0.0]) == 1
    assert goodness_of_fit([9990, 10], [0.999, 0.001]) == pytest.approx(1)
    # rare cells are joined: 1000 cells of which none expects 5, against draws that all fall on one of them
    p = np.append([0.9], np.full(1000, 1e-4))
    assert goodness_of_fit(np.append([9000], np.append([1000], np.zeros(999))), p) == pytest.approx(1)
    assert goodness_of_fit(np.append([9500], np.append([500], np.zeros(999))), p) < 1e-9
    for counts, wrong in (([1, 2], [0.5, 0.4]), ([1, 2], [1.5, -0.5]), ([1, 2], [1.0])):
        with pytest.raises(ValueError, match="must be"):
            goodness_of_fit(counts, wrong)


def test_draws_that_are_off_name_the_worst_token():
    tokens = np.repeat([0, 1, 2], [6000, 2000, 2000])
    assert_draws(tokens, [0.6, 0.2, 0.2], false_alarm=1e-6)
    with pytest.raises(AssertionError, match=r"dice: .* worst is token 1, drawn 2000 of 10000 times where 1000.0"):
        assert_draws(tokens, [0.65, 0.1, 0.25], false_alarm=1e-6, what="dice")
    for wrong in ([], [3], [-1]):
        with pytest.raises(AssertionError, match=r"\[0, 3\)"):
            assert_draws(wrong, [0.6, 0.2, 0.2], false_alarm=1e-6)


def test_distribution():
    row = np.log(np.float32([0.5, 0.25, 0.15, 0.1]))
    assert distribution(row, SamplingParams(temperature=1)) == pytest.approx([0.5, 0.25, 0.15, 0.1], rel=1e-6)
    assert distribution(row, SamplingParams(top_k=2)) == pytest.approx([2 / 3, 1 / 3, 0, 0], rel=1e-6)
    assert distribution(row, SamplingParams(temperature=0.5)) == pytest.approx(
        np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345, rel=1e-6
    )
    assert distribution(row, SamplingParams(seed=4)).tolist() == [1, 0, 0, 0]
    assert distribution([3.4e38, -3.4e38], SamplingParams(temperature=1)).tolist() == [1, 0]
    with pytest.raises(ValueError, match="status 1"):
        distribution([np.nan, 1], SamplingParams(temperature=1))


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_are_what_their_names_say(kind):
    row = nasty_row(kind, 400, 1)
    assert (row.dtype, row.shape) == (np.float32, (400,))
    assert_bits(row, nasty_row(kind, 400, 1))
    status = sample(row[None], SamplingParams(temperature=1), positions=0).status[0]
    assert status == {"empty": 2}.get(kind, 1 if kind.lstrip("+-").endswith(("nan", "inf")) else 0)


def test_rows_hold_what_breaks_samplers():
    rows = nasty_rows(300, 200, 1)
    assert_bits(rows, nasty_rows(300, 200, 1))
    bits, good = rows.view(np.uint32), nasty_rows(300, 200, 1, sound=True)
    assert (np.isnan(rows) & (bits < 2**31)).any()
    assert (np.isnan(rows) & (bits > 2**31)).any()
    assert (rows == np.inf).any()
    assert (rows == -np.inf).all(axis=1).any()
    assert {0, 2**31, 1} < set(bits.ravel().tolist())
    assert not np.isnan(good).any()
    assert (good < np.inf).all()
    assert (good > -np.inf).any(axis=1).all()


def test_parameters_take_all_shapes():
    params = nasty_params(2000, 50, 1)
    assert params == nasty_params(2000, 50, 1)
    assert 0.2 < np.mean([p.greedy for p in params]) < 0.9
    drawn = [p.row for p in params if not p.greedy]
    used = {(row.min_p > 0, row.top_k < 50, row.top_p < 2**32, row.reciprocal != 1) for row in drawn}
    assert len(used) == 16
