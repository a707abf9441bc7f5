"""Cases from the field, kind sampling_filters: what is kept, and that nothing else is drawn."""

import numpy as np
import pytest

from klero import ParameterError, SamplingParams, explain, sample
from klero.device import HAVE_NUMBA
from klero.lots.noise import lot_of_word
from klero.testing import goodness_of_fit

BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba"))]
backends = pytest.mark.parametrize("backend", BACKENDS)


def kept(logits, **fields):
    return explain(np.float32(logits), SamplingParams(**fields), seed=1, position=0).kept.tolist()


@backends
@pytest.mark.parametrize("top_p", [0.0, 1e-12, 0.001])
def test_SM_02_a_tiny_top_p_keeps_the_likeliest_token(top_p, backend):
    params = SamplingParams(temperature=1.0, top_p=top_p)
    drawn = sample(np.float32([[1, 3, 2]] * 50), params, positions=np.arange(50), seeds=4, backend=backend)
    assert set(drawn.token_ids.tolist()) == {1}
    assert set(drawn.num_kept.tolist()) == {1}
    assert kept([1, 3, 2], temperature=1.0, top_p=top_p) == [1]


@backends
def test_SM_04_any_mixture_of_top_k_in_one_batch(backend):
    table = [
        ({"top_k": 5_000_000}, 128), ({"top_k": 0}, 128), ({"top_k": -1}, 128), ({"top_k": 64}, 64),
        ({"top_k": 1}, 1), ({"temperature": 0.0, "top_k": 0}, 1), ({"top_k": 128}, 128),
    ]  # fmt: skip
    rows = np.random.default_rng(1).standard_normal((len(table), 128)).astype(np.float32)
    params = [SamplingParams(**fields) for fields, _ in table]
    drawn = sample(rows, params, positions=0, seeds=2, backend=backend)
    assert drawn.num_kept.tolist() == [count for _, count in table]
    assert drawn.status.tolist() == [0] * len(table)


@pytest.mark.parametrize("top_k", [2.5, -2, True])
def test_SM_04_a_top_k_that_is_none_is_told_and_the_next_request_is_served(top_k):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(top_k=top_k)
    assert (caught.value.field, caught.value.value) == ("top_k", top_k)
    assert sample(np.zeros((1, 128), np.float32), SamplingParams(top_k=5), positions=0).status[0] == 0


TIED = np.float32([5, 5, 5, 1])


@backends
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_SM_05_top_k_1_is_greedy_on_a_tie(batch_size, backend):
    for seed in range(0, 200, 10):
        params = SamplingParams(temperature=1.0, top_k=1)
        drawn = sample(np.tile(TIED, (batch_size, 1)), params, positions=0, seeds=seed, backend=backend)
        assert set(drawn.token_ids.tolist()) == {0}


@backends
def test_SM_05_top_k_2_keeps_the_two_lowest_of_three_equals_at_every_batch_size(backend):
    assert kept(TIED, temperature=1.0, top_k=2) == [0, 1]
    params, seeds = SamplingParams(temperature=1.0, top_k=2), np.arange(200)
    by_size = []
    for size in (1, 8, 32):
        parts = [
            sample(np.tile(TIED, (len(part), 1)), params, positions=0, seeds=part, backend=backend).token_ids
            for part in np.split(seeds, range(size, 200, size))
        ]
        by_size.append(np.concatenate(parts).tolist())
    assert by_size[0] == by_size[1] == by_size[2]
    assert set(by_size[0]) == {0, 1}
    assert 0.4 < np.mean(by_size[0]) < 0.6


@pytest.mark.parametrize("top_p, right", [(0.45, [0]), (0.55, [0, 1]), (0.72, [0, 1]), (0.8, [0, 1, 2])])
def test_SM_07_the_token_that_crosses_the_threshold_is_kept(top_p, right):
    row = np.log(np.float32([0.5, 0.25, 0.15, 0.1]))
    assert kept(row, temperature=1.0, top_p=top_p) == right
    for backend in ["reference", *(["cpu"] if HAVE_NUMBA else [])]:
        params = SamplingParams(temperature=1.0, top_p=top_p)
        drawn = sample(np.tile(row, (2000, 1)), params, positions=np.arange(2000), seeds=3, backend=backend)
        assert set(drawn.num_kept.tolist()) == {len(right)}
        assert set(drawn.token_ids.tolist()) == set(right)


@backends
def test_SM_08_only_what_can_be_drawn_is_drawn(backend):
    # The case feeds uniform numbers. klero draws a lot from a 32-bit word (docs/draw.md, 4), and every word has a
    # finite one: there is no end of a range to fall off. 10,000 positions stand for the repeats of the case
    # (2,000 on the reference, which is slow).
    assert np.isfinite(lot_of_word([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])).all()
    params = SamplingParams(temperature=1.0, top_k=2147483647, top_p=1.0)
    row = np.float32([-np.inf, 0, -np.inf, -np.inf])
    repeats = 10_000 if backend == "cpu" else 2_000
    drawn = sample(np.tile(row, (repeats, 1)), params, positions=np.arange(repeats), seeds=5, backend=backend)
    assert set(drawn.token_ids.tolist()) == {1}
    assert set(drawn.num_kept.tolist()) == {1}


@backends
def test_SM_08_a_token_without_weight_is_kept_but_never_drawn(backend):
    # A finite logit can be so far down that its weight is 0: it stays in the set (docs/draw.md, 3) and does not win.
    row = np.float32([-200, 0, -200, 0])
    rows = np.tile(row, (2000, 1))
    drawn = sample(rows, SamplingParams(temperature=1), positions=np.arange(2000), seeds=5, backend=backend)
    assert set(drawn.num_kept.tolist()) == {4}
    assert goodness_of_fit(np.bincount(drawn.token_ids, minlength=4), [0, 0.5, 0, 0.5]) > 1e-6
