"""Filters in NumPy on a sorted row: the definition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from klero.lots.mass import lse, masses, ordered_keys
from klero.lots.noise import COIN, uniform
from klero.lots.pinned import exp32
from klero.params import RowParams
from klero.params.row import TOP_P_OFF, TYPICAL_P_OFF
from klero.sampling.filters.sorted_row import SortedRow

F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
LARGEST = np.finfo(np.float32).max
SIGMA_BITS = 20  # of the fixed-point distances of top-n-sigma


def total_order(logits: F32) -> I64:
    """Return the ids of all tokens with l > -inf, larger logit first, lower id on a tie. logits: canonical [V]."""
    order = np.argsort(~ordered_keys(logits), kind="stable")
    return order[logits[order] > -np.inf]


def entropy(row: SortedRow) -> np.float32:
    """H in nats: lse(Q) + (sum of floor(w * -s * 2^40)) / Q, one binary32 division; w = 0 brings 0."""
    with np.errstate(invalid="ignore"):  # 0 * inf, which is not taken
        terms = np.where(row.weights > 0, row.weights * -row.scaled, np.float32(0))
    surprise = masses(terms).sum(dtype=np.uint64)
    return np.float32(lse(row.mass) + surprise.astype(np.float32) / np.uint64(row.mass).astype(np.float32))


def typical_p(row: SortedRow, typical: int) -> I64:
    """Return the places, ascending, of the tokens nearest to the expected surprise, up to the needed mass."""
    shift = np.abs((lse(row.mass) - row.scaled) - entropy(row))
    order = np.argsort(shift, kind="stable")
    return np.sort(order[: top_p(row.masses[order], typical)])


def top_n_sigma(logits: F32, n: np.float32) -> int:
    """Return how many leading tokens lie within n standard deviations of the first. logits: in the total order."""
    with np.errstate(over="ignore"):
        d = np.minimum(logits[0] - logits, LARGEST)
        k = SIGMA_BITS - int(np.frexp(d[-1])[1]) if d[-1] > 0 else 0
        u = np.ldexp(d.astype(np.float64), k).astype(np.uint64)  # < 2^20
        mean = float(u.sum(dtype=np.uint64)) / float(len(u))
        variance = max(float((u * u).sum(dtype=np.uint64)) / float(len(u)) - mean * mean, 0.0)
        limit = np.float64(n) * np.sqrt(np.float64(variance)) * np.float64(2.0) ** -k
        return int(np.count_nonzero(d <= np.float32(limit)))


def at_least(q: U64, need: int) -> int:
    """Return how many leading tokens have a mass of `need` or more; never less than one. q: in the total order."""
    return max(1, int(np.count_nonzero(q >= np.uint64(need))))


def epsilon(row: SortedRow, least: int) -> int:
    """Return how many tokens have a probability of least / 2^32 or more, of Q."""
    return at_least(row.masses, needed_mass(row.mass, least))


def eta(row: SortedRow, least: np.float32) -> int:
    """The same for min(least, sqrt(least) * exp(-H))."""
    bound = min(least, np.float32(np.sqrt(least) * exp32(np.array([-entropy(row)], np.float32))[0]))
    return epsilon(row, int(float(bound) * 2.0**32))


def top_a(row: SortedRow, a: int) -> int:
    """Return how many tokens have a probability of a / 2^32 * (the largest one)^2 or more; in binary64."""
    need = np.float64(a) * 2.0**48 / np.float64(row.mass)
    return max(1, int(np.count_nonzero(row.masses.astype(np.float64) >= need)))


def min_p(w: F32, threshold: np.float32) -> int:
    """Return how many leading tokens have w >= threshold. w: weights in the total order."""
    return int(np.count_nonzero(w >= threshold))


def needed_mass(mass: int, top_p: int) -> int:
    """max(1, ceil(P * Q / 2^32)), exact."""
    return max(1, -((-top_p * mass) >> 32))


def top_p(q: U64, top_p: int) -> int:
    """Return the length of the shortest prefix whose mass reaches the needed one. q: masses in the total order."""
    sums = np.cumsum(q)
    need = np.uint64(needed_mass(int(sums[-1]), top_p))  # a Python int would be compared through binary64
    return int(np.searchsorted(sums, need)) + 1


def xtc(row: SortedRow, threshold: int) -> int:
    """Return how many leading tokens leave: of those that reach the threshold, all but the last."""
    need = np.uint64(needed_mass(row.mass, threshold))
    return max(0, int(np.count_nonzero(row.masses >= need)) - 1)


def cuts(
    row: SortedRow, params: RowParams, vocab_size: int, seed: int, position: int, child: int
) -> Iterator[tuple[str, SortedRow]]:
    """Yield (filter, what is left) for every filter that is not neutral, in order, but for those of one's own."""
    r = np.float32(params.reciprocal)
    if params.typical_p < TYPICAL_P_OFF:
        row = row.marked(typical_p(row, params.typical_p), r)
        yield "typical-p", row
    if params.top_n_sigma > 0:
        row = row.first(top_n_sigma(row.logits, np.float32(params.top_n_sigma)))
        yield "top-n-sigma", row
    if params.epsilon > 0:
        row = row.first(epsilon(row, params.epsilon))
        yield "epsilon", row
    if params.eta > 0:
        row = row.first(eta(row, np.float32(params.eta)))
        yield "eta", row
    if params.top_a > 0:
        row = row.first(top_a(row, params.top_a))
        yield "top-a", row
    if params.min_p > 0:
        row = row.first(min_p(row.weights, np.float32(params.min_p)))
        yield "min-p", row
    if params.top_k < vocab_size:
        row = row.first(params.top_k)
        yield "top-k", row
    if params.top_p < TOP_P_OFF:
        row = row.first(top_p(row.masses, params.top_p))
        yield "top-p", row
    if params.xtc_probability > 0:
        if uniform(seed, position, child, COIN) <= np.float32(params.xtc_probability):
            row = row.marked(np.arange(xtc(row, params.xtc_threshold), len(row)), r)
        yield "xtc", row
