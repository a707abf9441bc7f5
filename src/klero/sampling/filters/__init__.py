"""Filters: where the sorted row is cut (docs/draw.md, 3).

What enters is every token with l > -inf in the total order: larger logit first, equal logits by lower id. In this order
(`cuts`), each one skipped at its neutral value:

- filters of one's own (own.py): from a `SortedRow` to so many leading tokens, or to a mask. What is left is weighed
  anew.
- typical_p: tokens by the distance of their surprise from the entropy, until their mass reaches the needed one; what is
  left is weighed anew. Neutral 2^32.
- top_n_sigma: logits at most n standard deviations below the largest. Neutral 0.
- epsilon: q >= needed_mass(Q, E); eta: the same with min(e, sqrt(e) * exp(-H)); top_a: q / Q >= a * (largest q / Q)^2;
  Q, H of what the filters before them left. Neutral 0.
- min_p(w, p): tokens with w >= p. Neutral 0.
- top_k: the first k of what is left; ties go to the lowest ids. Neutral: k >= V.
- top_p(q, P): the shortest prefix whose mass reaches max(1, ceil(P * Q / 2^32)), Q the mass of what is left. Neutral
  2^32.
- xtc: when the coin falls, all but the last of the tokens with q >= needed_mass(Q, threshold) leave, from the front;
  what is left is weighed anew. Neutral: probability 0.

top_n_sigma to top_p keep a *prefix* and never remove the first token of what reaches them.

Agreement of kernel and reference: *set*, and as the set is an exact function of integers, the same ids bit for bit.
Filters of one's own have no kernel.
"""

from klero.sampling.filters.own import Filter, FilterFailed, keep_own
from klero.sampling.filters.reference import cuts, min_p, needed_mass, top_p, total_order
from klero.sampling.filters.sorted_row import SortedRow, weigh

__all__ = [
    "Filter",
    "FilterFailed",
    "SortedRow",
    "cuts",
    "keep_own",
    "min_p",
    "needed_mass",
    "top_p",
    "total_order",
    "weigh",
]
