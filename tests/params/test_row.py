"""Greedy or not, and the rounded values of a row: docs/draw.md, section 1 and the end of the notation, as tables."""

import fractions

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import SamplingParams
from klero.params import NEUTRAL, ROW_DTYPE, RowParams, rows_of_bytes, seed_bits

OFF_K, OFF_P = 2**31 - 1, 2**32
BELOW = float(np.nextafter(np.float32(1e-6), np.float32(0)))
NEAR_1 = 1 - 2.0**-25  # halfway between the last binary32 below 1 and 1: to even is 1

GREEDY = [
    # silence: nothing set, or nothing but a min_p that is 0
    {},
    {"min_p": 0},
    {"min_p": 0.0},
    {"min_p": 1e-40},
    {"min_p": 2.0**-127},
    # explicit
    {"temperature": 0},
    {"temperature": 5e-324},
    {"temperature": 9.9e-7},
    {"temperature": BELOW},
    {"temperature": 0, "top_p": 0.9, "top_k": 50, "min_p": 0.1},
    {"top_k": 1},
    {"top_k": 1, "temperature": 5},
    {"top_p": 0},
    {"top_p": 1e-12},
    {"top_p": 2.0**-33},  # 0.5 * 2^-32: ties to even, P = 0
    {"temperature": 2, "top_p": 0},
    {"min_p": 1},
    {"min_p": 0.999999999},
    {"min_p": NEAR_1},
    {"temperature": 2, "min_p": 1.0},
]

DRAWN = [
    ({"temperature": 1}, NEUTRAL),
    ({"temperature": 1e-6}, (float(np.float32(1) / np.float32(1e-6)), OFF_K, OFF_P, 0.0)),
    ({"temperature": 1e6}, (float(np.float32(1) / np.float32(1e6)), OFF_K, OFF_P, 0.0)),
    ({"temperature": 0.7}, (float(np.float32(1) / np.float32(0.7)), OFF_K, OFF_P, 0.0)),
    # an explicit neutral value is set: not silent, not a filter
    ({"top_k": 0}, NEUTRAL),
    ({"top_k": -1}, NEUTRAL),
    ({"top_p": 1}, NEUTRAL),
    ({"top_p": 1.0, "top_k": 0, "min_p": 0}, NEUTRAL),
    ({"temperature": 1, "min_p": 1e-40}, NEUTRAL),
    ({"temperature": 1, "top_k": 2**31 - 1}, NEUTRAL),
    ({"temperature": 1, "top_k": 2**70}, NEUTRAL),
    ({"temperature": 1, "top_p": 1 - 2.0**-34}, NEUTRAL),  # nearest: P = 2^32
    # one filter alone is not silence
    ({"top_k": 2}, (1.0, 2, OFF_P, 0.0)),
    ({"top_p": 0.5}, (1.0, OFF_K, 2**31, 0.0)),
    ({"top_p": 1e-9}, (1.0, OFF_K, 4, 0.0)),
    ({"top_p": 3 * 2.0**-33}, (1.0, OFF_K, 2, 0.0)),  # 1.5 to even
    ({"top_p": 5 * 2.0**-33}, (1.0, OFF_K, 2, 0.0)),  # 2.5 to even
    ({"top_p": 1 - 3 * 2.0**-33}, (1.0, OFF_K, 2**32 - 2, 0.0)),
    ({"min_p": 0.25}, (1.0, OFF_K, OFF_P, 0.25)),
    ({"min_p": 2.0**-126}, (1.0, OFF_K, OFF_P, 2.0**-126)),
    ({"min_p": 0.1}, (1.0, OFF_K, OFF_P, float(np.float32(0.1)))),
    ({"min_p": NEAR_1 - 2.0**-50}, (1.0, OFF_K, OFF_P, 1 - 2.0**-24)),
    ({"temperature": 4, "top_k": 9, "top_p": 0.75, "min_p": 0.5}, (0.25, 9, 3 * 2**30, 0.5)),
]


@pytest.mark.parametrize("fields", GREEDY, ids=str)
def test_greedy(fields):
    params = SamplingParams(**fields)
    assert params.greedy
    assert params.row == RowParams(greedy=True)


@pytest.mark.parametrize("fields, right", DRAWN, ids=str)
def test_drawn(fields, right):
    params = SamplingParams(**fields)
    assert not params.greedy
    assert params.row == (right if right is NEUTRAL else RowParams(False, *right))


def test_fields_outside_shaping_do_not_break_silence():
    assert SamplingParams(seed=5, n=3, max_tokens=7, stop="a", min_tokens=1).greedy


OTHERS = [
    ({"top_n_sigma": 1}, {"top_n_sigma": 1.0}),
    ({"top_n_sigma": 0.1}, {"top_n_sigma": float(np.float32(0.1))}),
    ({"top_n_sigma": 1e-300}, {"top_n_sigma": 2.0**-126}),  # never 0, which would be off
    ({"epsilon_cutoff": 0.25}, {"epsilon": 2**30}),
    ({"epsilon_cutoff": 3e-4}, {"epsilon": 1288490}),
    ({"eta_cutoff": 3e-4}, {"eta": float(np.float32(3e-4))}),
    ({"top_a": 0.5}, {"top_a": 2**31}),
    ({"top_a": 1}, {"top_a": 2**32}),
    ({"typical_p": 0.5}, {"typical_p": 2**31}),
    ({"typical_p": 1e-12}, {"typical_p": 0}),
    ({"xtc_probability": 0.5}, {"xtc_probability": 0.5, "xtc_threshold": 429496730}),  # 0.1
    ({"xtc_probability": 1, "xtc_threshold": 0.5}, {"xtc_probability": 1.0, "xtc_threshold": 2**31}),
    ({"xtc_probability": 1, "xtc_threshold": 0}, {"xtc_probability": 1.0, "xtc_threshold": 0}),
]
STILL_NEUTRAL = [
    {"top_n_sigma": -1},
    {"top_n_sigma": 0},
    {"epsilon_cutoff": 0},
    {"epsilon_cutoff": 2.0**-33},
    {"eta_cutoff": 2.0**-127},
    {"top_a": 2.0**-33},
    {"typical_p": 1},
    {"typical_p": 1 - 2.0**-34},
    {"xtc_probability": 0, "xtc_threshold": 0.2},
    {"xtc_probability": 1e-40},
    {"xtc_probability": 1, "xtc_threshold": 0.5000001},
]


@pytest.mark.parametrize("fields, right", OTHERS, ids=str)
def test_other_filters_break_silence(fields, right):
    assert SamplingParams(**fields).row == RowParams(**right)
    shaped = SamplingParams(temperature=0.5, top_k=7, **fields)
    assert shaped.row == RowParams(reciprocal=2.0, top_k=7, **right)


@pytest.mark.parametrize("fields", STILL_NEUTRAL, ids=str)
def test_other_filters_at_a_neutral_value_do_not(fields):
    assert SamplingParams(**fields).greedy
    assert SamplingParams(temperature=1, **fields).row == NEUTRAL


def test_filters_of_ones_own_break_silence():
    assert SamplingParams(filters=len).row == NEUTRAL
    assert SamplingParams(filters=[]).greedy


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"min_p": 1}], ids=str)
def test_a_greedy_row_has_no_filters(greedy):
    params = SamplingParams(**greedy, filters=len, typical_p=0.5, xtc_probability=1, top_n_sigma=1, top_a=0.5)
    assert params.row == RowParams(greedy=True)


def test_rewriting_does_not_break_silence():
    params = SamplingParams(logit_bias={1: 2}, repetition_penalty=2, bad_words="a", logits_processors=len)
    assert params.greedy


@pytest.mark.parametrize(
    "fields, rewrites, penalises",
    [
        ({}, False, False),
        ({"min_tokens": 3, "prompt_ignore_length": 2, "stop": "a", "top_k": 2}, False, False),
        ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": -0.0}, False, False),
        ({"logit_bias": {}, "bad_words": [], "bad_token_ids": [], "no_repeat_ngram_size": 0}, False, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"presence_penalty": -1}, True, True),
        ({"frequency_penalty": 0.1}, True, True),
        ({"logit_bias": {0: 0}}, True, False),
        ({"embedding_bias": [0]}, True, False),
        ({"bad_words": "a"}, True, False),
        ({"bad_token_ids": [0]}, True, False),
        ({"no_repeat_ngram_size": 2}, True, False),
        ({"allowed_token_ids": [0]}, True, False),
        ({"logits_processors": len}, True, False),
        ({"filters": len}, False, False),
    ],
    ids=str,
)
def test_what_rewrites_and_what_penalises(fields, rewrites, penalises):
    params = SamplingParams(**fields)
    assert (params.rewrites, params.penalises) == (rewrites, penalises)


@pytest.mark.parametrize(
    "fields, right",
    [
        ({}, False),
        ({"top_n_sigma": 1, "top_a": 0.5, "eta_cutoff": 0.1, "xtc_probability": 1, "typical_p": 0.5}, False),
        ({"filters": len}, True),
        ({"filters": len, "temperature": 0}, False),
        ({"filters": len, "top_p": 0}, True),  # greedy now; a decay may lift it
    ],
    ids=str,
)
def test_who_calls_filters_of_ones_own(fields, right):
    assert SamplingParams(**fields).has_own_filters is right


def test_rows_built_from_the_first_five_values_have_neutral_others():
    assert np.array(RowParams(False, 1.25, 9, 2**31, 0.5), ROW_DTYPE).item() == (
        False, 1.25, 9, 2**31, 0.5, 0.0, 0, 0.0, 0, 2**32, 2**32, 0.0,
    )  # fmt: skip
    assert ROW_DTYPE.names == RowParams._fields


@given(st.floats(0, 1))
def test_top_p_is_rounded_to_nearest_ties_to_even_from_binary64(p):
    row = SamplingParams(temperature=1, top_p=p).row
    right = round(fractions.Fraction(p) * 2**32)
    assert row.greedy if right == 0 else row.top_p == right


@given(st.floats(1e-6, 1e6))
def test_temperature_is_rounded_to_binary32_before_the_division(t):
    row = SamplingParams(temperature=t).row
    if np.float32(t) >= np.float32(1e-6):
        assert np.float32(row.reciprocal) == np.float32(1) / np.float32(t)
        assert float(np.float32(row.reciprocal)) == row.reciprocal


def test_an_array_of_rows_keeps_every_value():
    rows = [SamplingParams(**fields).row for fields in [*GREEDY, *(fields for fields, _ in [*DRAWN, *OTHERS])]]
    stacked = np.array(rows, ROW_DTYPE)
    assert stacked.dtype == ROW_DTYPE
    assert [RowParams(*record.item()) for record in stacked] == rows


def test_the_bytes_of_rows_are_the_rows():
    params = [SamplingParams(**fields) for fields in [*GREEDY, *(fields for fields, _ in [*DRAWN, *OTHERS])]]
    stacked = rows_of_bytes([one.row_bytes for one in params], len(params))
    assert stacked.dtype == ROW_DTYPE
    assert stacked.tolist() == np.array([one.row for one in params], ROW_DTYPE).tolist()
    stacked[:] = NEUTRAL  # its memory is its own
    assert RowParams(*rows_of_bytes([params[-1].row_bytes], 1)[0].item()) == params[-1].row
    assert rows_of_bytes([params[-1].row_bytes], 3).tolist() == [params[-1].row] * 3
    assert rows_of_bytes([], 0).shape == rows_of_bytes([params[0].row_bytes], 0).shape == (0,)


@pytest.mark.parametrize(
    "fields, plain",
    [
        ({}, True),
        ({"temperature": 1, "top_p": 0.9, "xtc_probability": 0.5, "typical_p": 0.5}, True),
        ({"seed": 1, "n": 2, "max_tokens": 3, "stop": "x", "prompt_logprobs": 1}, True),
        ({"filters": lambda row: row}, False),
        ({"filters": lambda row: row, "temperature": 0}, True),  # none of them is called
        ({"logit_bias": {1: 1}}, False),
        ({"bad_words": "x"}, False),
        ({"allowed_token_ids": [1]}, False),
        ({"logits_processors": lambda ids, row: row}, False),
        ({"min_tokens": 1}, False),
        ({"top_p": 0.9, "top_p_decay": 0.5}, False),
        ({"regex": "x"}, False),
        ({"thinking_token_budget": 0}, False),
        ({"logprobs": 0}, False),
        ({"return_kept": True}, False),
        ({"return_probs": True}, False),
    ],
)
def test_who_is_plain(fields, plain):
    assert SamplingParams(**fields).plain is plain


@pytest.mark.parametrize(
    "seed, bits", [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63, 2**63), (-5, 2**64 - 5)]
)
def test_negative_seeds_are_the_same_bits(seed, bits):
    assert seed_bits(seed) == bits
    assert SamplingParams(seed=seed).seed == seed
