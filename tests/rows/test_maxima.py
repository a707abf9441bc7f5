"""Block maxima: one read tells the largest key, and NaN, infinities and -inf apart; greedy takes the lowest id."""

import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA
from klero.lots.mass import canonical, ordered_keys
from klero.rows.maxima import reference
from klero.sampling.greedy import greedy
from klero.testing import nasty_row, nasty_rows

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")


def signed_keys(logits):
    """The kernels' keys: those of the reference with the top bit turned over."""
    return (ordered_keys(logits) ^ np.uint32(2**31)).view(np.int32)


@needs_numba
@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_block_maxima_are_the_largest_keys_of_flushed_logits(size):
    from klero.rows.maxima.cpu import BLOCK, block_maxima, flush_key, lowest_id
    from klero.rows.view.cpu import num_alive_of

    for row in nasty_rows(80, size, 1, sound=True):
        maxima = np.empty(-(-size // BLOCK), np.int32)
        top, widest = block_maxima(row.view(np.int32), maxima)
        expected, raw_top, raw_widest = reference.block_maxima(row, BLOCK)
        assert maxima.tolist() == expected.tolist()
        assert (top, widest) == (raw_top, raw_widest)
        keys = signed_keys(canonical(row))
        assert flush_key(top) == keys.max() == expected.max()
        assert lowest_id(row.view(np.int32), maxima, keys.max()) == int(np.argmax(keys))
        assert num_alive_of(row.view(np.int32)) == int((row > -np.inf).sum())


@needs_numba
@pytest.mark.parametrize("place", [0, 255, 256, 700, 999])
@pytest.mark.parametrize(
    "bits, bad",
    [
        (0x7F800000, True), (0x7F800001, True), (0x7FC00000, True), (0x7FFFFFFF, True), (0xFF800001, True),
        (0xFFC00000, True), (0xFFFFFFFF, True), (0xFF800000, False), (0x7F7FFFFF, False), (0xFF7FFFFF, False),
    ],
)  # fmt: skip
def test_bad_rows_are_told_from_two_maxima(bits, bad, place):
    from klero.rows.maxima.cpu import block_maxima
    from klero.rows.view.cpu import is_bad

    for kind in ("normal", "empty", "banned", "huge"):
        row = nasty_row(kind, 1000, 2)
        row.view(np.uint32)[place] = bits
        assert is_bad(*block_maxima(row.view(np.int32), np.empty(4, np.int32))) == bad


@needs_numba
def test_flushed_keys_and_bits_agree():
    from klero.lots.mass.cpu import flush, key_of_bits
    from klero.rows.maxima.cpu import flush_key

    edges = [0, 1, 0x007FFFFF, 0x00800000, 0x1F7FFFFF, 0x1F800000, 0x1F800001, 0x7F7FFFFF, 0x7F800000]
    for magnitude in edges:
        for sign in (0, 0x80000000):
            bits = np.uint32(magnitude | sign).view(np.int32)
            logit = np.array([bits]).view(np.float32)
            assert flush_key(key_of_bits(bits)) == key_of_bits(flush(bits)) == signed_keys(canonical(logit))[0]
            assert key_of_bits(key_of_bits(bits)) == bits


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_takes_the_lowest_id_of_the_largest_logit(backend):
    if backend == "cpu" and not HAVE_NUMBA:
        pytest.skip("needs Numba")
    rows = nasty_rows(400, 600, 3, sound=True)
    sampled = sample(rows, SamplingParams(), positions=0, backend=backend)
    exact = [int(np.argmax(np.where(np.abs(row) < 2.0**-64, 0, row))) for row in rows]
    assert sampled.token_ids.tolist() == exact == [greedy(canonical(row)) for row in rows]
    assert set(sampled.num_kept.tolist()) == {1}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_draws_no_lots(backend):
    if backend == "cpu" and not HAVE_NUMBA:
        pytest.skip("needs Numba")
    rows = nasty_rows(50, 300, 4, sound=True)
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=0)):
        right = sample(rows, SamplingParams(), positions=0, seeds=0, backend=backend).token_ids.tolist()
        assert sample(rows, params, positions=9, seeds=8, children=7, backend=backend).token_ids.tolist() == right
