"""Laws: do draws come as often as they should? Chi-square goodness of fit, with its p-value in closed form."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from klero.lots.mass import canonical
from klero.params import SamplingParams
from klero.sampling.explain import explain

F64 = npt.NDArray[np.float64]


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square variable with `degrees` >= 1 degrees of freedom reaches `statistic`.

    The finite sums for whole and half-whole shapes, no approximation: with h = x/2, and a running over 0, 1, ... below
    degrees/2 (even) or 1/2, 3/2, ... (odd): sum of h^a e^-h / gamma(a + 1), and erfc(sqrt(h)) more when odd.
    """
    if degrees < 1 or math.isnan(statistic):
        raise ValueError(f"statistic={statistic}, degrees={degrees}: needs a number and at least one degree of freedom")
    if statistic <= 0:
        return 1.0
    if math.isinf(statistic):
        return 0.0
    h = statistic / 2
    start = 0.5 if degrees % 2 else 0.0
    terms = [math.exp((start + j) * math.log(h) - h - math.lgamma(start + j + 1)) for j in range(degrees // 2)]
    return min(1.0, math.fsum(terms) + (math.erfc(math.sqrt(h)) if degrees % 2 else 0.0))


def goodness_of_fit(counts: npt.ArrayLike, probabilities: npt.ArrayLike, *, min_expected: float = 5) -> float:
    """Return the p-value of Pearson's chi-square test that `counts` were drawn from `probabilities`.

    counts: int [V]; probabilities: [V], summing to 1. Cells that expect fewer than min_expected draws are joined into
    one (with the smallest other cell, if that is still too few), since the law of the statistic is a limit. A draw of a
    token whose probability is 0 gives 0. A single cell left gives 1: there is nothing to test.
    """
    drawn, p = np.asarray(counts, np.int64), np.asarray(probabilities, np.float64)
    if drawn.shape != p.shape or drawn.ndim != 1 or abs(p.sum() - 1) > 1e-9 or (p < 0).any():
        raise ValueError(f"counts {drawn.shape}, probabilities {p.shape}: must be [V] both, the latter summing to 1")
    if drawn[p == 0].any():
        return 0.0
    order = np.argsort(-p, kind="stable")
    expected, seen = p[order] * drawn.sum(), drawn[order]
    large = int(np.count_nonzero(expected >= min_expected))
    if 0 < expected[large:].sum() < min_expected:
        large -= 1
    expected, seen = (np.append(x[:large], x[large:].sum()) for x in (expected, seen))
    cells = expected > 0
    expected, seen = expected[cells], seen[cells]
    if len(expected) < 2:
        return 1.0
    return chi_square_tail(float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1)


def assert_draws(
    tokens: npt.ArrayLike, probabilities: npt.ArrayLike, *, false_alarm: float, what: str = "draws"
) -> None:
    """Raise AssertionError unless the tokens pass as independent draws from `probabilities`.

    tokens: int [N], ids below V; probabilities: [V]. false_alarm: the rate at which a right sampler would fail, were
    its seeds fresh; with fixed seeds the outcome is fixed. For a family of K tests at rate f together, give f / K.
    """
    p = np.asarray(probabilities, np.float64)
    drawn = np.asarray(tokens)
    if drawn.size == 0 or drawn.min() < 0 or drawn.max() >= p.size:
        raise AssertionError(f"{what}: token ids must lie in [0, {p.size})")
    counts = np.bincount(drawn.reshape(-1), minlength=p.size)
    value = goodness_of_fit(counts, p)
    if value < false_alarm:
        spread = np.sqrt(np.maximum(p * (1 - p) * drawn.size, 1e-300))
        worst = int(np.argmax(np.abs(counts - p * drawn.size) / spread))
        raise AssertionError(
            f"{what}: p-value {value:.3g} is below the false-alarm rate {false_alarm:.3g}; worst is token {worst}, "
            f"drawn {counts[worst]} of {drawn.size} times where {p[worst] * drawn.size:.1f} were expected"
        )


def distribution(logits_row: npt.ArrayLike, params: SamplingParams) -> F64:
    """Return the probability of every token of one row after the filters, in binary64. logits_row: [V]; result: [V].

    The kept ids are those of `klero.explain`; a greedy row is a point mass. Raises ValueError for a row that cannot be
    drawn.
    """
    row = np.asarray(logits_row, np.float32)
    asked = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    explained = explain(row, asked, seed=0, position=0)
    if explained.status:
        raise ValueError(f"a row of status {explained.status} has no distribution: {explained}")
    logits = canonical(row).astype(np.float64)[explained.kept] * float(params.row.reciprocal)
    w = np.exp(logits - logits.max())
    p = np.zeros(len(row))
    p[explained.kept] = w / w.sum()
    return p
