"""The kernels rewrite as rewrite/order.py does, bit for bit, whatever is asked at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewrite.mixtures import LOGITS, WIDTHS, contexts

from klero.device import HAVE_NUMBA
from klero.lots.mass import canonical
from klero.rewrite import rewrite_row
from klero.rows.maxima.reference import block_maxima
from klero.testing import nasty_row

pytestmark = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")


def agree(raw, at):
    from tests.rewrite.kernels import rewrite_by_kernel

    widened = (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.uint16 else raw
    right = rewrite_row(widened, at).logits
    before = raw.copy()
    by_block, by_token, maxima, top, widest, alive = rewrite_by_kernel(raw, at)
    assert np.array_equal(canonical(by_block).view(np.int32), right.view(np.int32))
    assert np.array_equal(by_token, by_block)
    right_maxima, right_top, _ = block_maxima(right, 256)
    assert maxima.tolist() == right_maxima.tolist()
    assert top == right_top
    assert alive == np.count_nonzero(right > -np.inf)
    assert (int(widest) >= 0xFF800000) == bool(np.isneginf(right).any())
    assert np.array_equal(raw, before)


@given(st.data())
def test_any_mixture_on_rows_of_chosen_values(data):
    width = data.draw(st.sampled_from(WIDTHS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    agree(rng.choice(np.float32(LOGITS), width), data.draw(contexts(width)))


@given(st.data())
def test_any_mixture_on_nasty_rows(data):
    width = data.draw(st.sampled_from(WIDTHS))
    kind = data.draw(st.sampled_from(["normal", "peaked", "ties", "banned", "zeros", "huge", "any bits", "edges"]))
    agree(nasty_row(kind, width, data.draw(st.integers(0, 2**16))), data.draw(contexts(width)))


@given(st.data())
def test_any_mixture_on_bfloat16_rows(data):
    width = data.draw(st.sampled_from(WIDTHS))
    row = nasty_row(data.draw(st.sampled_from(["normal", "ties", "huge"])), width, data.draw(st.integers(0, 2**16)))
    agree((row.view(np.uint32) >> 16).astype(np.uint16), data.draw(contexts(width)))


@given(st.data())
def test_a_bad_row_is_bad_whatever_bans_hide(data):
    from tests.rewrite.kernels import rewrite_by_kernel

    from klero.rows.view.cpu import is_bad

    width = data.draw(st.sampled_from(WIDTHS))
    row = nasty_row(data.draw(st.sampled_from(["+inf", "+nan", "-nan", "signalling nan"])), width, 3)
    *_, top, widest, _ = rewrite_by_kernel(row, data.draw(contexts(width)))
    assert is_bad(np.int32(top), np.uint32(widest))
