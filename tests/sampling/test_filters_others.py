"""typical-p, top-n-sigma, epsilon, eta, top-a and XTC: by hand, by plain formulas, and kernel against reference."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import SamplingParams
from klero.device import HAVE_NUMBA
from klero.lots.noise import COIN, uniform
from klero.params import ROW_DTYPE
from klero.sampling.fused import reference
from klero.sampling.fused.reference import sample_row
from klero.testing import nasty_rows

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
INF = np.inf
# probabilities 0.5, 0.25, 0.15, 0.1: entropy 1.2080 nats, surprises 0.693, 1.386, 1.897, 2.303
FOUR = np.log(np.float32([0.5, 0.25, 0.15, 0.1]))


def drawn(logits, seed=1, position=2, **fields):
    return sample_row(np.float32(logits), SamplingParams(**fields).row, seed, position, 0)


def kept(logits, **fields):
    return sorted(drawn(logits, **fields).kept.tolist())


@pytest.mark.parametrize(
    "logits, fields, right",
    [
        # finite 2, 1, 0: standard deviation 0.8165
        ([2, 1, 0, -INF, -INF], {"top_n_sigma": 1}, [0]),
        ([2, 1, 0, -INF, -INF], {"top_n_sigma": 1.22}, [0]),
        ([2, 1, 0, -INF, -INF], {"top_n_sigma": 1.23}, [0, 1]),
        ([2, 1, 0, -INF, -INF], {"top_n_sigma": 2.46}, [0, 1, 2]),
        # on the logits, before temperature
        ([2, 1, 0], {"top_n_sigma": 1, "temperature": 100}, [0]),
        ([3, 3, 3], {"top_n_sigma": 0.01}, [0, 1, 2]),
        ([-5, -INF], {"top_n_sigma": 1}, [0]),
        ([0, 1, 1, 0], {"top_n_sigma": 1e-3}, [1, 2]),
        # distances that overflow count as the largest finite number: deviation half of it
        ([3e38, -3e38], {"top_n_sigma": 1.9}, [0]),
        ([3e38, -3e38], {"top_n_sigma": 2.001}, [0, 1]),
        (FOUR, {"epsilon_cutoff": 0.12}, [0, 1, 2]),
        (FOUR, {"epsilon_cutoff": 0.2}, [0, 1]),
        (FOUR, {"epsilon_cutoff": 0.6}, [0]),
        ([1, 1, 1], {"epsilon_cutoff": 0.4}, [0]),
        ([1, 1, 1], {"epsilon_cutoff": 0.3}, [0, 1, 2]),
        # exp(-H) = 0.2988; sqrt(0.25) * 0.2988 = 0.1494; sqrt(0.09) * 0.2988 = 0.0896 < 0.09
        (FOUR, {"eta_cutoff": 0.25}, [0, 1, 2]),
        (FOUR, {"eta_cutoff": 0.26}, [0, 1]),
        (FOUR, {"eta_cutoff": 0.09}, [0, 1, 2, 3]),
        # 0.5^2 = 0.25 of a: 0.25 * 0.7 = 0.175
        (FOUR, {"top_a": 0.7}, [0, 1]),
        (FOUR, {"top_a": 0.5}, [0, 1, 2]),
        (FOUR, {"top_a": 0.3}, [0, 1, 2, 3]),
        ([4, 4], {"top_a": 1}, [0, 1]),
        # nearest to 1.208: id 1 (0.178), id 0 (0.515), id 2 (0.689), id 3 (1.095)
        (FOUR, {"typical_p": 0.2}, [1]),
        (FOUR, {"typical_p": 0.3}, [0, 1]),
        (FOUR, {"typical_p": 0.8}, [0, 1, 2]),
        (FOUR, {"typical_p": 0.95}, [0, 1, 2, 3]),
        ([7, 7, 7, 7], {"typical_p": 0.5}, [0, 1]),
        # all that reach the threshold leave but the last of them
        (FOUR, {"xtc_probability": 1, "xtc_threshold": 0.2}, [1, 2, 3]),
        (FOUR, {"xtc_probability": 1, "xtc_threshold": 0.12}, [2, 3]),
        (FOUR, {"xtc_probability": 1, "xtc_threshold": 0.01}, [3]),
        (FOUR, {"xtc_probability": 1, "xtc_threshold": 0.3}, [0, 1, 2, 3]),
        ([5, 5, 5, 0], {"xtc_probability": 1, "xtc_threshold": 0.2}, [2, 3]),
        # one after the other: each takes its Q of what is left
        (FOUR, {"top_k": 2, "xtc_probability": 1, "xtc_threshold": 0.3}, [1]),
        (FOUR, {"epsilon_cutoff": 0.2, "top_a": 0.9}, [0]),
        (FOUR, {"typical_p": 0.2, "epsilon_cutoff": 0.9}, [1]),
    ],
)
def test_by_hand(logits, fields, right):
    fields = {"temperature": 1} | fields
    assert kept(logits, **fields) == right
    if HAVE_NUMBA:
        assert both(np.float32(logits)[None], [SamplingParams(**fields)])["cpu"][2].tolist() == [len(right)]


def both(rows, params, seeds=None, positions=None):
    """{backend: (tokens, status, numbers kept)} of rows; bfloat16 bits as uint16."""
    from klero.rows.inputs import as_float32
    from klero.sampling import fused

    num_rows, out = len(rows), {}
    table = np.array([p.row for p in params], ROW_DTYPE)
    seeds = np.arange(num_rows, dtype=np.uint64) if seeds is None else seeds
    positions = np.full(num_rows, 7, np.uint32) if positions is None else positions
    asked = np.arange(num_rows), table, seeds, positions, np.zeros(num_rows, np.uint32)
    for backend in ("cpu", "reference"):
        out[backend] = tuple(np.full(num_rows, -9, dtype) for dtype in (np.int32, np.int8, np.int32))
        if backend == "reference":
            reference.sample_rows(as_float32(rows), *asked, *out[backend])
        else:
            bits = rows if rows.dtype == np.uint16 else rows.view(np.int32)
            fused.cpu_kernel()(bits, rows.shape[1], *asked, *out[backend])
    return out


@st.composite
def asked_filters(draw):
    """A mixture of all filters, neutral and at the edges of their ranges."""
    off = st.just(0.0)
    least = st.one_of(off, st.sampled_from([1e-9, 1e-3, 0.05, 0.4, 0.99999999]), st.floats(1e-6, 0.5))
    return SamplingParams(
        temperature=draw(st.sampled_from([1.0, 0.3, 2.0, 1e6, 1e-5])),
        typical_p=draw(st.sampled_from([1, 1, 1, 1e-12, 0.2, 0.5, 0.9, 0.9999999])),
        top_n_sigma=draw(st.one_of(off, st.sampled_from([1e-3, 0.5, 1, 2, 5, 1e6]), st.floats(0.1, 4))),
        epsilon_cutoff=draw(least),
        eta_cutoff=draw(least),
        top_a=draw(st.one_of(off, st.just(1.0), st.floats(1e-6, 1))),
        min_p=draw(st.sampled_from([None, None, 0.1])),
        top_k=draw(st.sampled_from([None, None, 3, 50])),
        top_p=draw(st.sampled_from([None, None, 0.5, 0.9, 0.999])),
        xtc_probability=draw(st.sampled_from([0, 0, 0.5, 1])),
        xtc_threshold=draw(st.sampled_from([0, 1e-6, 0.01, 0.1, 0.5])),
    )


@needs_numba
@given(st.data(), st.integers(0, 2**32), st.sampled_from([1, 2, 3, 31, 255, 257, 700, 2049]), st.booleans())
def test_the_kernel_keeps_and_draws_what_the_reference_does(data, seed, vocab_size, half):
    rows = nasty_rows(25, vocab_size, seed)
    if half:
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    params = [data.draw(asked_filters()) for _ in range(25)]
    seeds = np.random.default_rng(seed).integers(0, 2**63, 25).astype(np.uint64)
    out = both(rows, params, seeds, seeds.astype(np.uint32))
    for cpu, right in zip(out["cpu"], out["reference"], strict=True):
        assert cpu.tolist() == right.tolist(), params


@needs_numba
@given(st.data(), st.integers(0, 2**32), st.sampled_from([3, 257, 700]))
def test_the_kernel_lists_the_ids_that_the_reference_keeps(data, seed, vocab_size):
    from tests.lots import kernels

    for row in nasty_rows(10, vocab_size, seed, sound=True):
        params = data.draw(asked_filters()).row._replace(xtc_probability=0.0, typical_p=2**32)
        assert sorted(kernels.kept(row, params).tolist()) == sorted(sample_row(row, params, 1, 2, 0).kept.tolist())


def plain_kept(logits, fields):
    """The formulas in binary64, and how near the nearest token is to the border."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    p = np.exp(logits[order] - logits.max())
    p /= p.sum()
    entropy = -(p * np.log(p)).sum()
    ((name, value),) = fields.items()
    if name == "top_n_sigma":
        number, border = logits[order], logits.max() - value * logits.std()
    elif name == "typical_p":
        shift = np.abs(-np.log(p) - entropy)
        by = np.argsort(shift, kind="stable")
        sums = np.cumsum(p[by])
        last = int((sums < value).sum())
        near = np.abs(sums - value).min() < 1e-5 or np.diff(shift[by]).min() < 1e-5
        return sorted(order[by[: last + 1]].tolist()), near
    else:
        number = p
        border = {
            "epsilon_cutoff": value,
            "eta_cutoff": min(value, math.sqrt(value) * math.exp(-entropy)),
            "top_a": value * p[0] ** 2,
        }[name]
    left = max(1, int((number >= border).sum()))
    return sorted(order[:left].tolist()), np.abs(number / border - 1).min() < 1e-4


@given(
    st.integers(0, 2**32),
    st.sampled_from(["top_n_sigma", "epsilon_cutoff", "eta_cutoff", "top_a", "typical_p"]),
    st.floats(0.001, 0.999),
)
def test_away_from_a_border_the_formulas_in_binary64_agree(seed, name, value):
    logits = (np.random.default_rng(seed).standard_normal(40) * 2).astype(np.float32)
    fields = {name: value * 4 if name == "top_n_sigma" else value}
    right, near = plain_kept(logits, fields)
    if not near:
        assert kept(logits, temperature=1, **fields) == right


PREFIXES = ["top_n_sigma", "epsilon_cutoff", "eta_cutoff", "top_a"]


@given(st.integers(0, 2**32), st.sampled_from(PREFIXES), st.floats(1e-6, 0.999), st.floats(1e-6, 0.999))
def test_each_keeps_the_first_token_and_a_stricter_one_keeps_no_more(seed, name, one, other):
    loose, strict = (max(one, other), min(one, other)) if name == "top_n_sigma" else (min(one, other), max(one, other))
    for row in nasty_rows(5, 60, seed, sound=True):
        first = drawn(row, temperature=1).kept
        many, few = (drawn(row, temperature=1, **{name: value}).kept for value in (loose, strict))
        assert few.tolist() == first[: len(few)].tolist()
        assert 1 <= len(few) <= len(many)


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5]))
def test_xtc_leaves_the_last_of_the_top_choices_and_all_below(seed, threshold):
    for row in nasty_rows(5, 60, seed, sound=True):
        before = drawn(row, temperature=1).kept
        after = drawn(row, temperature=1, xtc_probability=1, xtc_threshold=threshold).kept
        assert after.tolist() == before[len(before) - len(after) :].tolist()
        assert len(after) >= 1


def binomial_tail(successes, trials, p):
    """The probability of a count at least as far from p * trials, on either side; exact."""
    log = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(p) + (trials - k) * math.log1p(-p)
        for k in range(trials + 1)
    ]  # fmt: skip
    far = abs(successes - p * trials)
    return math.fsum(math.exp(log[k]) for k in range(trials + 1) if abs(k - p * trials) >= far - 1e-9)


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_the_coin_falls_as_often_as_asked(probability):
    """Exact binomial test over 4000 positions; false-alarm rate 1e-4 each, the seed is fixed."""
    fields = {"xtc_probability": probability, "xtc_threshold": 0.2}
    acted = sum(len(drawn(FOUR, 11, position, **fields).kept) == 3 for position in range(4000))
    assert binomial_tail(acted, 4000, probability) > 1e-4
    assert binomial_tail(acted, 4000, probability / 2) < 1e-4  # and the test could have failed


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_the_coin_is_the_single_number_of_purpose_4(probability):
    for position in range(100):
        acts = uniform(5, position, 0, COIN) <= np.float32(probability)
        now = drawn(FOUR, 5, position, xtc_probability=probability, xtc_threshold=0.2)
        assert len(now.kept) == (3 if acts else 4)


def test_after_xtc_the_token_draws_with_the_lots_it_had():
    for position in range(50):
        free = drawn(FOUR, 3, position, temperature=1)
        now = drawn(FOUR, 3, position, temperature=1, xtc_probability=1, xtc_threshold=0.2)
        assert now.token == free.token or free.token == 0
