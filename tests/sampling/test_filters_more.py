"""More of the filters: through klero.sample, on rows that rules rewrite, and where 32 bits would not do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import SamplingParams, SortedRow, sample
from klero.device import HAVE_NUMBA
from klero.sampling.filters import top_p, total_order, weigh
from klero.sampling.fused.reference import sample_row
from klero.sampling.status import FAILED, OK
from klero.testing import assert_bits, assert_token, nasty_rows

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
BACKENDS = ["reference", pytest.param("cpu", marks=needs_numba)]
MIXTURES = (
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "top_k": 5},
    {"epsilon_cutoff": 0.01, "temperature": 0.7},
    {"eta_cutoff": 0.05, "top_p": 0.9},
    {"top_a": 0.4, "min_p": 0.01},
    {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    {"top_n_sigma": 2.5, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "top_a": 0.1, "xtc_probability": 0.5},
)


def as_bfloat16(rows):
    return (rows.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@needs_numba
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("vocab_size", [2, 33, 257, 1025])
def test_rewritten_rows_agree_with_the_reference(vocab_size, half):
    """Bias, bans and masks in front of the filters: the kernel sees the row through them."""
    num_rows, rng = 70, np.random.default_rng(vocab_size)
    rows = nasty_rows(num_rows, vocab_size, 21)
    words = rng.integers(-(2**31), 2**31, (2, num_rows, -(-vocab_size // 32))).astype(np.int32)
    asked = [
        SamplingParams(
            logit_bias={i % vocab_size: float(rng.choice([-np.inf, -2, 4]))},
            bad_token_ids=[int(rng.integers(vocab_size))],
            repetition_penalty=float(rng.choice([1, 1.3])),
            **{"temperature": 1.0} | MIXTURES[i % len(MIXTURES)],
        )
        for i in range(num_rows)
    ]  # fmt: skip
    told = {
        "prompts": rng.integers(0, vocab_size, (num_rows, 3)).tolist(),
        "outputs": rng.integers(0, vocab_size, (num_rows, 2)).tolist(),
        "masks": words[0] | words[1],
        "seeds": np.arange(num_rows),
    }
    cpu, right = (
        sample(as_bfloat16(rows) if half else rows, asked, backend=backend, **told) for backend in ("cpu", "reference")
    )
    assert_token(cpu.status, right.status, "status")
    assert_token(cpu.token_ids, right.token_ids, "token_ids")
    assert_token(cpu.num_kept, right.num_kept, "num_kept")
    assert (right.status == OK).sum() > 10


@needs_numba
@pytest.mark.parametrize("vocab_size", [255, 1023, 1024, 1025, 4099, 70_001])
def test_the_sums_of_top_n_sigma_hold_when_every_distance_is_the_longest(vocab_size):
    """u = 2^20 - 1 for all but one token: the largest sums that there can be.

    Of N - 1 equal distances and one 0 the deviation is distance * sqrt(N - 1) / N.
    """
    row = np.full((1, vocab_size), 2.0**-23, np.float32)
    row[0, vocab_size // 2] = 2
    border = vocab_size / np.sqrt(vocab_size - 1)
    for n, kept in [(border * (1 - 1e-4), 1), (border * (1 + 1e-4), vocab_size)]:
        for backend in ("cpu", "reference"):
            drawn = sample(row, SamplingParams(top_n_sigma=n, temperature=1), seeds=1, positions=0, backend=backend)
            assert drawn.num_kept[0] == kept


@needs_numba
@given(st.integers(0, 2**32), st.sampled_from([700, 1023, 1500, 4097]), st.floats(0.01, 6))
def test_top_n_sigma_of_wide_rows_is_the_reference_bit_for_bit(seed, vocab_size, n):
    """With and without -inf, flushed logits and overflow: each takes its own way through the kernel."""
    rows = nasty_rows(8, vocab_size, seed, sound=True)
    rows[0] = np.random.default_rng(seed).standard_normal(vocab_size) * 2.0**-64  # two thirds below 2^-64
    asked = SamplingParams(top_n_sigma=n, temperature=1)
    cpu = sample(rows, asked, seeds=seed, positions=0, backend="cpu")
    reference = sample(rows, asked, seeds=seed, positions=0, backend="reference")
    assert_token(cpu.num_kept, reference.num_kept, "num_kept")
    assert_token(cpu.token_ids, reference.token_ids, "token_ids")


@needs_numba
@given(st.integers(0, 2**32), st.sampled_from([1, 31, 257, 700]))
def test_adding_a_filter_changes_a_token_only_by_removing_it(seed, vocab_size):
    row = nasty_rows(1, vocab_size, seed, sound=True)[0]
    free = sample_row(row, SamplingParams(temperature=1).row, seed, 4, 0).token
    for fields in (*MIXTURES, {"typical_p": 0.6}):
        asked = SamplingParams(**fields | {"temperature": 1})
        explained = sample_row(row, asked.row, seed, 4, 0)
        if free in explained.kept:
            assert explained.token == free


def own_min_p(row: SortedRow) -> int:
    return int((row.weights >= np.float32(0.05)).sum())


def own_top_k(row: SortedRow) -> int:
    return min(3, len(row))


def own_top_p(row: SortedRow) -> int:
    return top_p(row.masses, SamplingParams(top_p=0.8).row.top_p)


@pytest.mark.parametrize(
    "mine, fields", [(own_min_p, {"min_p": 0.05}), (own_top_k, {"top_k": 3}), (own_top_p, {"top_p": 0.8})]
)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_filter_of_ones_own_does_what_the_built_in_one_does(backend, half, mine, fields):
    rows = nasty_rows(60, 300, 22)
    rows = as_bfloat16(rows) if half else rows
    at = {"seeds": np.arange(60), "positions": 3, "backend": backend}
    own = sample(rows, SamplingParams(temperature=0.9, filters=mine), **at)
    built_in = sample(rows, SamplingParams(temperature=0.9, **fields), **at)
    for name in ("status", "token_ids", "num_kept"):
        assert_bits(getattr(own, name), getattr(built_in, name), name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_filter_that_fails_ends_its_own_row(backend):
    def mine(row):
        raise RuntimeError("no idea")

    rows = nasty_rows(5, 300, 23, sound=True)
    plain = SamplingParams(temperature=1, top_p=0.9)
    at = {"seeds": 9, "positions": 3, "backend": backend}
    right = sample(rows, plain, **at)
    asked = [plain, SamplingParams(filters=mine), plain, SamplingParams(filters=lambda row: len(row) + 1), plain]
    drawn = sample(rows, asked, **at)
    assert drawn.status.tolist() == [OK, FAILED, OK, FAILED, OK]
    assert_bits(drawn.token_ids[::2], right.token_ids[::2])
    assert_bits(drawn.num_kept[::2], right.num_kept[::2])
    assert (drawn.token_ids[1::2] == -1).all()
    assert (drawn.num_kept[1::2] == 0).all()
    assert drawn.messages[1] == "filters: mine raised RuntimeError: no idea"
    assert drawn.messages[3].startswith("filters: <lambda> returned ")
    assert set(drawn.messages) == {1, 3}


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 40]))
def test_weighed_anew_is_the_row_of_the_tokens_that_are_left(seed, vocab_size):
    row = nasty_rows(1, vocab_size, seed, sound=True)[0]
    order = total_order(row)
    left = np.random.default_rng(seed).random(len(order)) < 0.5
    left[-1] = True
    r = np.float32(1.25)
    some = weigh(order, row[order], r).marked(left, r)
    alone = np.where(np.isin(np.arange(vocab_size), order[left]), row, np.float32(-np.inf))
    again = weigh(total_order(alone), alone[total_order(alone)], r)
    for name in ("ids", "logits", "scaled", "weights", "masses"):
        assert_bits(getattr(some, name), getattr(again, name), name)
