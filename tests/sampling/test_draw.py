"""The draw: what the kernels skip could not have won."""

import functools

import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA
from klero.lots.noise import lot_of_word, lots_of_ids
from klero.sampling.draw import draw

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")


def test_the_largest_score_wins_and_the_lowest_id_on_a_tie():
    lots = lots_of_ids(np.arange(6), 3, 1, 2)
    flat = np.zeros(6, np.float32)
    token, score = draw(np.arange(6), flat, 3, 1, 2)
    assert (token, score) == (int(lots.argmax()), lots.max())
    # a score that overflows to -inf never wins; scores far apart leave no chance; order of the ids does not matter
    assert draw(np.array([5, 2]), np.float32([-np.inf, 0]), 3, 1, 2)[0] == 2
    assert draw(np.array([2, 5]), np.float32([0, -60]), 3, 1, 2)[0] == 2
    assert draw(np.arange(6)[::-1], flat, 3, 1, 2)[0] == token


@functools.cache
def rows_whose_two_tokens_tie(vocab_size, low, high, lowest_is_top):
    """Rows [N, V] of two tokens, `low` < `high`, whose scores are equal to the last bit, and the seed of each.

    The top token has l = 0, the other one as much less as its lot is larger.
    """
    top, other = (low, high) if lowest_is_top else (high, low)
    rows, seeds = [], []
    for seed in range(1500):
        g_top, g_other = lots_of_ids([top, other], seed, 6, 0)
        gap = g_top - g_other
        if -20 < gap < 0 and gap + g_other == g_top:
            row = np.full(vocab_size, -np.inf, np.float32)
            row[top], row[other] = 0, gap
            rows.append(row)
            seeds.append(seed)
    return np.stack(rows), seeds


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("low, high", [(3, 4), (5, 900), (255, 256)])
@pytest.mark.parametrize("lowest_is_top", [True, False])
def test_a_tie_of_scores_goes_to_the_lowest_id(backend, low, high, lowest_is_top):
    if backend == "cpu" and not HAVE_NUMBA:
        pytest.skip("needs Numba")
    rows, seeds = rows_whose_two_tokens_tie(1000, low, high, lowest_is_top)
    assert len(seeds) > 50
    for fields in ({"temperature": 1}, {"top_k": 2}):
        sampled = sample(rows, SamplingParams(**fields), positions=6, seeds=seeds, backend=backend)
        assert set(sampled.token_ids.tolist()) == {low}


@needs_numba
def test_the_largest_lot_is_the_lot_of_word_zero():
    from klero.sampling.draw.cpu import LARGEST_LOT

    assert lot_of_word(0) == LARGEST_LOT


@needs_numba
def test_no_word_above_the_limit_can_reach_the_best_score():
    from klero.sampling.draw.cpu import ALL_WORDS, word_limit

    rng = np.random.default_rng(1)
    best = np.concatenate([rng.uniform(-3.2, 22.9, 20_000), [-np.inf, 22.873857, -3.1299946, 0, 0]]).astype(np.float32)
    smax = np.concatenate([-rng.exponential(6, 20_000), [0, 0, 0, -np.inf, -3e38]]).astype(np.float32)
    limit = np.array([word_limit(b, s) for b, s in zip(best, smax, strict=True)], np.uint32)
    above = limit < ALL_WORDS
    # lots never rise with the word: the first word above the limit stands for all of them
    highest = smax[above] + lot_of_word(limit[above] + np.uint32(1))
    assert (highest < best[above]).all()
    # and the limit is a limit: not much of what it lets through is hopeless
    useful = above & (smax > -20) & (best - smax < 20) & (best - smax > 3)
    assert (smax[useful] + lot_of_word((limit[useful] * 0.99).astype(np.uint32)) >= best[useful]).mean() > 0.5


@needs_numba
@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1}, {"temperature": 2.5}, {"top_k": 4500}, {"temperature": 3, "top_p": 0.98}, {"min_p": 1e-6}],
    ids=str,
)
def test_draws_from_thousands_of_kept_tokens(order, fields):
    """Many chunks, in which the likeliest token comes first, last or anywhere."""
    row = np.random.default_rng(3).standard_normal(5000).astype(np.float32) * np.float32(1.5)
    row = {"rising": np.sort(row), "falling": np.sort(row)[::-1], "mixed": row}[order]
    rows, params = np.tile(row, (150, 1)), SamplingParams(**fields)
    cpu, reference = (sample(rows, params, positions=7, seeds=np.arange(150), backend=b) for b in ("cpu", "reference"))
    assert cpu.token_ids.tolist() == reference.token_ids.tolist()
    assert cpu.num_kept.tolist() == reference.num_kept.tolist()
    assert cpu.num_kept[0] > 2000
    assert len({*cpu.token_ids.tolist()}) > 50


@needs_numba
def test_a_winner_far_from_the_largest_logit_is_found():
    rng = np.random.default_rng(2)
    rows = rng.uniform(-6, -5, (200, 3000)).astype(np.float32)
    rows[:, 1500] = 0
    params = SamplingParams(temperature=1)
    at = {"positions": 8, "seeds": np.arange(200)}
    cpu, reference = (sample(rows, params, backend=b, **at).token_ids for b in ("cpu", "reference"))
    assert cpu.tolist() == reference.tolist()
    assert len({*(cpu // 256).tolist()}) > 8
