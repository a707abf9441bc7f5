"""Top-p decay: P after each token, as integers of 2^32 and against exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import SamplingParams
from klero.params import Decay, RowParams, next_top_p, top_p_after

P90, P30 = 3865470566, 1288490189  # 0.9 and 0.3 of 2^32, to the nearest integer
HALF = 2**31


def test_worked_values():
    params = SamplingParams(top_p=0.9, top_p_decay=0.5, top_p_min=0.3, top_p_reset_id=9)
    assert params.decay == Decay(start=P90, factor=HALF, least=P30, reset_id=9)
    tokens = [5, 6, 7, 9, 8]
    assert [top_p_after(params.decay, tokens[:n]) for n in range(6)] == [P90, P90 // 2, P30, P30, P90, P90 // 2]


@pytest.mark.parametrize(
    "fields, right",
    [
        ({}, None),
        ({"top_p": 0.5}, None),
        ({"top_p_decay": 1}, None),
        ({"top_p_decay": 1 - 2.0**-34, "top_p_min": 0.5}, None),  # rounds to 2^32: P stays
        ({"top_p_decay": 0.5}, Decay(2**32, HALF, 4295, -1)),  # least: 1e-6
        ({"top_p_decay": 0.5, "top_p": 0.25}, Decay(2**30, HALF, 4295, -1)),
        ({"top_p_decay": 0.5, "top_p": 0, "top_p_min": 0.5}, Decay(0, HALF, HALF, -1)),
        ({"top_p_decay": 1 - 2.0**-32, "top_p_min": 1, "top_p_reset_id": 0}, Decay(2**32, 2**32 - 1, 2**32, 0)),
        ({"top_p_decay": 5e-324, "top_p_min": 5e-324}, Decay(2**32, 0, 0, -1)),
    ],
    ids=str,
)
def test_what_the_fields_come_to(fields, right):
    assert SamplingParams(**fields).decay == right


def test_the_least_may_be_above_the_start():
    decay = SamplingParams(top_p=0.25, top_p_decay=0.5, top_p_min=0.5).decay
    assert top_p_after(decay, []) == 2**30
    assert top_p_after(decay, [1]) == 2**31


def test_silence_is_broken_by_a_decay_below_1():
    assert SamplingParams(top_p_decay=1).greedy
    assert SamplingParams(top_p_decay=1 - 2.0**-34).greedy
    params = SamplingParams(top_p_decay=0.5)
    assert not params.greedy
    assert params.row == RowParams()
    assert params.row_at(HALF) == RowParams(top_p=HALF)


def test_greedy_is_asked_again_with_the_current_p():
    rising = SamplingParams(top_p=0, top_p_decay=0.5, top_p_min=0.25, top_k=9)
    assert rising.greedy
    assert rising.row_at(top_p_after(rising.decay, [7])) == RowParams(top_k=9, top_p=2**30)
    falling = SamplingParams(top_p_decay=1e-10, top_p_min=1e-10)
    assert not falling.greedy
    assert falling.row_at(top_p_after(falling.decay, [7])) == RowParams(greedy=True)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 1}, {"min_p": 1}], ids=str)
def test_a_row_that_is_greedy_for_another_reason_stays_so(fields):
    params = SamplingParams(top_p=0.9, top_p_decay=0.5, **fields)
    for top_p in (0, 1, HALF, 2**32):
        assert params.row_at(top_p) == RowParams(greedy=True)


@given(
    st.integers(0, 2**32), st.integers(0, 2**32), st.integers(0, 2**32 - 1), st.integers(0, 2**32),
    st.integers(-1, 3), st.integers(0, 3),
)  # fmt: skip
def test_next_is_the_floor_of_the_exact_product(top_p, start, factor, least, reset_id, token_id):
    one = Fraction(2**32)
    exact = (top_p / one) * (factor / one) * one
    right = start if token_id == reset_id else max(exact.numerator // exact.denominator, least)
    assert next_top_p(top_p, Decay(start, factor, least, reset_id), token_id) == right


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 20), st.floats(0, 1), st.floats(0.01, 1))
def test_p_follows_from_the_output_alone(tokens, cut, top_p, factor):
    decay = SamplingParams(top_p=top_p, top_p_decay=factor, top_p_reset_id=2).decay
    if decay is None:
        return
    value = top_p_after(decay, tokens[:cut])
    for token_id in tokens[cut:]:
        value = next_top_p(value, decay, token_id)
    assert value == top_p_after(decay, tokens)
    assert min(decay.start, decay.least) <= value <= max(decay.start, decay.least)
