"""The cut: min-p, top-k, top-p against a plain loop over Python integers, and where they could be off by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import SamplingParams, explain, sample
from klero.device import HAVE_NUMBA
from klero.lots.mass import canonical, masses, scaled, weights
from klero.sampling.filters import needed_mass, total_order
from klero.testing import assert_set, nasty_params, nasty_rows


def plain_kept(raw, params):
    """docs/draw.md, section 3, read aloud. raw: float32 [V] that can be drawn; params: not greedy."""
    row, logits = params.row, canonical(raw)
    order = sorted((i for i in range(len(raw)) if logits[i] > -np.inf), key=lambda i: (-float(logits[i]), i))
    s = scaled(logits, logits[order[0]], np.float32(row.reciprocal))
    w = weights(s)
    q = {i: int(masses(w[i : i + 1])[0]) for i in order}
    if row.min_p > 0:
        order = [i for i in order if w[i] >= np.float32(row.min_p)]
    if row.top_k < len(raw):
        order = order[: row.top_k]
    if row.top_p < 2**32:
        need = max(1, -(-row.top_p * sum(q[i] for i in order) // 2**32))
        mass, kept = 0, []
        while mass < need:
            kept.append(order[len(kept)])
            mass += q[kept[-1]]
        order = kept
    return sorted(order)


def kept_of(raw, params):
    return explain(raw, params, seed=1, position=2).kept


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 31, 100, 300])
def test_the_reference_keeps_what_the_text_says(vocab_size):
    rows, params = nasty_rows(250, vocab_size, 1, sound=True), nasty_params(250, vocab_size, 1)
    for i in range(250):
        if not params[i].greedy:
            assert_set(kept_of(rows[i], params[i]), plain_kept(rows[i], params[i]), f"row {i}, {params[i]}")


@given(st.integers(0, 2**62), st.integers(1, 2**32))
def test_needed_mass_is_exact_and_in_64_bits(mass, top_p):
    right = max(1, -(-top_p * mass // 2**32))
    assert needed_mass(mass, top_p) == right
    in_64_bits = top_p * (mass >> 32) + ((top_p * (mass & (2**32 - 1)) + 2**32 - 1) >> 32)
    if top_p < 2**32:
        assert top_p * (mass & (2**32 - 1)) + 2**32 - 1 < 2**64
        assert max(1, in_64_bits) == right
        if HAVE_NUMBA:
            from klero.sampling.filters import cpu

            assert int(cpu.needed_mass(np.uint64(mass), np.uint64(top_p))) == right


def heavy():
    """Masses whose first 12288 reach 3 * 2^52 - 1, one unit short of three quarters of the whole, 2^54.

    The next one brings it. Above 2^53 binary64 cannot tell the two sums apart.
    """
    q = np.full(2**14 + 1, 2**40, np.uint64)
    q[12287], q[12288] = 2**40 - 1, 1
    assert float(3 * 2**52 - 1) == float(3 * 2**52)
    return q


def test_masses_above_two_to_the_53_are_compared_as_integers():
    from klero.sampling.filters import reference

    assert reference.top_p(heavy(), 3 * 2**30) == 12289
    assert reference.top_p(heavy(), 3 * 2**30 - 1) == 12288


@pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
def test_the_kernel_selects_above_two_to_the_53_by_integers():
    from klero.rows.select.cpu import BUCKETS
    from klero.sampling.filters import cpu

    q = heavy()
    keys = np.arange(q.size, 0, -1).astype(np.int32)
    shuffled = np.random.default_rng(1).permutation(q.size)
    for need, left in [(3 * 2**52, 12289), (3 * 2**52 - 1, 12288), (1, 1), (2**54, q.size)]:
        with_room = np.append(q[shuffled], np.zeros(BUCKETS, np.uint64))
        key, above = cpu.select(keys[shuffled], with_room, q.size, np.uint64(need))
        assert keys[left - 1] == key
        assert int(above) == int(q[: left - 1].sum(dtype=np.uint64))


@pytest.mark.parametrize("left", [1, 2, 5000, 16383])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_mass_that_needs_one_unit_more_keeps_one_token_more(backend, left):
    if backend == "cpu" and not HAVE_NUMBA:
        pytest.skip("needs Numba")
    row = np.zeros((1, 2**14), np.float32)  # the needed mass is P * 2^22, a token weighs 2^40
    for top_p, right in [(left * 2**18 - 1, left), (left * 2**18, left), (left * 2**18 + 1, left + 1)]:
        params = SamplingParams(top_p=top_p / 2**32)
        assert sample(row, params, positions=0, seeds=1, backend=backend).num_kept[0] == right


def test_the_order_is_by_logit_then_id_and_without_minus_infinity():
    row = canonical(np.float32([0.0, 3, -np.inf, 3, -0.0, 1e-30, 7, -1e-30]))
    assert total_order(row).tolist() == [6, 1, 3, 0, 4, 5, 7]
    assert total_order(np.full(4, -np.inf, np.float32)).tolist() == []


@pytest.mark.parametrize(
    "logits, fields, kept",
    [
        ([5, 5, 5, 1], {"top_k": 2}, [0, 1]),
        ([1, 5, 5, 5], {"top_k": 2}, [1, 2]),
        ([5, 1, 5, 1], {"top_k": 3}, [0, 1, 2]),
        ([0, 0, 0, 0], {"top_p": 0.5}, [0, 1]),
        ([0, 0, 0, 0], {"top_p": 0.5 + 2**-20}, [0, 1, 2]),
        ([0, 0, 0, 0], {"min_p": 0.9}, [0, 1, 2, 3]),
        ([2, 1, 0, -1], {"min_p": float(np.exp(-1) - 1e-6)}, [0, 1]),
        ([2, 1, 0, -1], {"min_p": float(np.exp(-1) + 1e-6)}, [0]),
        # min-p and top-k come before top-p, which sees what they left
        ([2, 1, 0, -1], {"top_p": 0.8}, [0, 1]),
        ([2, 1, 0, -1], {"top_p": 0.8, "top_k": 2}, [0, 1]),
        ([2, 1, 0, -1], {"top_p": 0.7, "top_k": 2}, [0]),
        ([2, 1, 0, -1], {"top_p": 0.7, "min_p": 0.3}, [0]),
        # temperature comes first
        ([2, 1, 0, -1], {"min_p": 0.3, "temperature": 2}, [0, 1, 2]),
        ([2, 1, 0, -1], {"top_p": 0.8, "temperature": 0.5}, [0]),
        # a neutral top_p keeps tokens that weigh nothing; any other drops them
        ([0, -90, -200], {"top_p": 1}, [0, 1, 2]),
        ([0, -90, -200], {"top_p": 0.999999999}, [0]),
        # a finite logit whose distance overflows stays in the set
        ([3.4e38, -3.4e38, -np.inf], {"temperature": 1}, [0, 1]),
        ([3.4e38, -3.4e38, -np.inf], {"top_k": 2}, [0, 1]),
        # the borders of a block of 256
        ([0] * 255 + [1, 1, 1] + [0] * 10, {"top_k": 2}, [255, 256]),
        ([0] * 600, {"top_k": 300}, list(range(300))),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_by_hand(backend, logits, fields, kept):
    if backend == "cpu" and not HAVE_NUMBA:
        pytest.skip("needs Numba")
    row, params = np.float32(logits), SamplingParams(**fields)
    if backend == "reference":
        assert kept_of(row, params).tolist() == kept
    else:
        from tests.lots import kernels

        assert kernels.kept(row, params.row).tolist() == kept
    sampled = sample(np.tile(row, (50, 1)), params, positions=np.arange(50), seeds=3, backend=backend)
    assert set(sampled.num_kept.tolist()) == {len(kept)}
    assert set(sampled.token_ids.tolist()) <= set(kept)


@given(st.integers(0, 2**32), st.sampled_from([2, 7, 64, 257]))
def test_adding_a_filter_changes_a_token_only_by_removing_it(seed, vocab_size):
    row = nasty_rows(1, vocab_size, seed, sound=True)
    free = SamplingParams(temperature=0.8)
    before = sample(row, free, positions=4, seeds=seed).token_ids[0]
    for fields in ({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.7, "min_p": 0.1}):
        filtered = SamplingParams(temperature=0.8, **fields)
        after = sample(row, filtered, positions=4, seeds=seed).token_ids[0]
        if before in kept_of(row[0], filtered):
            assert after == before


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(1, 300))
def test_top_k_keeps_exactly_k(seed, vocab_size, k):
    row = nasty_rows(1, vocab_size, seed, sound=True)
    params = SamplingParams(temperature=1, top_k=k)
    alive = int((row[0] > -np.inf).sum())
    assert sample(row, params, positions=0, seeds=1).num_kept[0] == (1 if k == 1 else min(k, alive))
