"""Draws come as often as they should: 20 distributions, and no correlation between neighbours of any kind.

The false-alarm rate of the 20 chi-square tests together is 1e-3, each 5e-5 (Bonferroni). Seeds are fixed, so the
outcome is too: the rate says how surprising a failure was for a right sampler, had its seeds been fresh.
"""

import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.lots.noise import lots_of_ids
from klero.lots.philox import words_of_ids
from klero.testing import assert_draws, chi_square_tail, distribution, goodness_of_fit

NUM_DRAWS = 20_000
FAMILY_RATE = 1e-3
RATE = FAMILY_RATE / 20

RNG = np.random.default_rng(2024)
GAUSS = RNG.standard_normal(257).astype(np.float32)
ZIPF = (-1.1 * np.log(np.arange(1, 1001))).astype(np.float32)
MASKED = np.where(np.arange(64) % 3 == 0, -np.inf, np.linspace(0, 2, 64)).astype(np.float32)
PEAK = np.float32([9, *RNG.uniform(0, 3, 99)])
T = SamplingParams

DISTRIBUTIONS = {
    "coin": (np.float32([0, 0]), T(temperature=1)),
    "unfair coin": (np.float32([0, 3]), T(temperature=1)),
    "die": (np.zeros(6, np.float32), T(temperature=1)),
    "three": (np.log(np.float32([0.6, 0.3, 0.1])), T(temperature=1)),
    "one in a thousand": (np.log(np.float32([0.999, 0.001])), T(temperature=1)),
    "flat 1000": (np.full(1000, 3, np.float32), T(temperature=1)),
    "gauss": (GAUSS, T(temperature=1)),
    "gauss cold": (GAUSS, T(temperature=0.4)),
    "gauss hot": (GAUSS, T(temperature=3)),
    "zipf": (ZIPF, T(temperature=1)),
    "zipf reversed": (ZIPF[::-1].copy(), T(temperature=1)),
    "masked": (MASKED, T(temperature=1)),
    "peak": (PEAK, T(temperature=1.5)),
    "top-k": (GAUSS, T(temperature=1, top_k=20)),
    "top-p": (GAUSS, T(temperature=1, top_p=0.8)),
    "min-p": (ZIPF, T(temperature=1, min_p=0.02)),
    "all filters": (GAUSS, T(temperature=1.3, top_k=60, top_p=0.9, min_p=0.05)),
    "top-k with ties": (np.repeat(np.float32([0, 1, 2]), 30), T(temperature=1, top_k=45)),
    "top-p with ties": (np.zeros(100, np.float32), T(temperature=1, top_p=0.333)),
    "large logits": (GAUSS[:50] + np.float32(2.0**12), T(temperature=1)),
}
ACROSS = {
    "seeds": lambda n: {"seeds": np.arange(n), "positions": 0},
    "positions": lambda n: {"seeds": 77, "positions": np.arange(n)},
    "children": lambda n: {"seeds": 77, "positions": 40, "children": np.arange(n)},
}


def draws(logits, params, counters, num_draws=NUM_DRAWS):
    """Tokens of many draws from one row, in parts that fit a cache."""
    counters = {name: np.broadcast_to(value, num_draws) for name, value in counters.items()}
    tokens = []
    for begin in range(0, num_draws, 2000):
        part = {name: value[begin : begin + 2000] for name, value in counters.items()}
        tokens.append(sample(np.tile(logits, (len(part["seeds"]), 1)), params, **part).token_ids)
    return np.concatenate(tokens)


def test_there_are_20_distributions():
    assert len(DISTRIBUTIONS) == 20


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_distribution(name):
    logits, params = DISTRIBUTIONS[name]
    across = list(ACROSS.values())[list(DISTRIBUTIONS).index(name) % 3]  # each way of counting on, in turn
    assert_draws(draws(logits, params, across(NUM_DRAWS)), distribution(logits, params), false_alarm=RATE, what=name)


@pytest.mark.deep
@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_many_more_draws_follow_the_distribution(name, across):
    logits, params = DISTRIBUTIONS[name]
    tokens = draws(logits, params, ACROSS[across](200_000), 200_000)
    assert_draws(tokens, distribution(logits, params), false_alarm=RATE / 3, what=name)


def two_points_moved(p):
    """p with two hundredths of the mass taken from the likeliest token and given to the least likely possible one."""
    moved = p.copy()
    moved[p.argmax()] -= 0.02
    moved[len(p) - 1 - np.where(p > 0, p, 2)[::-1].argmin()] += 0.02  # the last of them: another one on a tie
    return moved


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_two_points_of_moved_mass_are_caught(name):
    p = distribution(*DISTRIBUTIONS[name])
    wrong = two_points_moved(p) if p.max() > 0.02 else p * 0.98 + 0.02 * (np.arange(len(p)) == 0)
    with np.errstate(divide="ignore"):
        tokens = draws(np.log(wrong).astype(np.float32), SamplingParams(temperature=1), ACROSS["seeds"](NUM_DRAWS))
    with pytest.raises(AssertionError, match="is below the false-alarm rate"):
        assert_draws(tokens, p, false_alarm=RATE)


def words_matrix(vary):
    """Words of 2048 counters (rows) by 64 tokens."""
    ids = np.arange(64) * 5
    at = {
        "seeds": lambda i: (i, 9, 0, 0),
        "high words of seeds": lambda i: (i << 32, 9, 0, 0),
        "positions": lambda i: (5, i, 0, 0),
        "children": lambda i: (5, 9, i, 0),
        "purposes": lambda i: (5, 9, 0, i % 5) if i < 5 else (5, 9 + i // 5, 0, i % 5),
    }[vary]
    return np.stack([words_of_ids(ids, *at(i)) for i in range(2048)])


CORRELATION_SIGMAS = 5.0
"""|r| < 5 / sqrt(pairs): a false-alarm rate of 6e-7 each, below 1e-4 for all of them together."""


def assert_uncorrelated(a, b, what):
    r = np.corrcoef(a.ravel(), b.ravel())[0, 1]
    assert abs(r) < CORRELATION_SIGMAS / np.sqrt(a.size), f"{what}: r = {r:.5f} over {a.size} pairs"


@pytest.mark.parametrize("vary", ["seeds", "high words of seeds", "positions", "children", "purposes"])
def test_neighbouring_counters_are_not_correlated(vary):
    from klero.lots.noise import lot_of_word

    words = words_matrix(vary)
    for values in (words.astype(np.float64), lot_of_word(words).astype(np.float64)):
        for lag in (1, 2, 4, 5, 16):
            assert_uncorrelated(values[lag:], values[:-lag], f"{vary}, lag {lag}")
    differing = np.bitwise_count(words[1:] ^ words[:-1]) if hasattr(np, "bitwise_count") else None
    if differing is not None:  # half of the 32 bits change, give or take
        assert abs(differing.mean() - 16) < 5 * np.sqrt(8 / differing.size)


def test_neighbouring_tokens_are_not_correlated():
    lots = np.stack([lots_of_ids(np.arange(20_000), seed, 3, 0) for seed in range(10)]).astype(np.float64)
    for lag in (1, 2, 3, 4, 8, 256):
        assert_uncorrelated(lots[:, lag:], lots[:, :-lag], f"token ids, lag {lag}")


@pytest.mark.parametrize("across", ACROSS)
def test_tokens_of_neighbouring_draws_are_independent(across):
    """A chi-square test of the table of pairs, 8 by 8, at a rate of 1e-5."""
    tokens = draws(np.zeros(8, np.float32), SamplingParams(temperature=1), ACROSS[across](NUM_DRAWS))
    table = np.zeros((8, 8))
    np.add.at(table, (tokens[1:], tokens[:-1]), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    assert chi_square_tail(float(((table - expected) ** 2 / expected).sum()), 49) > 1e-5


def test_children_and_prompts_with_one_seed_share_nothing():
    """The same seed on another child is another stream: tokens agree as often as chance has it."""
    logits = np.zeros(16, np.float32)
    first, second = (
        draws(logits, SamplingParams(temperature=1), {"seeds": 3, "positions": np.arange(NUM_DRAWS), "children": child})
        for child in (0, 1)
    )
    same = int((first == second).sum())
    assert goodness_of_fit([same, NUM_DRAWS - same], [1 / 16, 15 / 16]) > 1e-5
