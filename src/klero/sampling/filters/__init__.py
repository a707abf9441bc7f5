"""Filters: where the sorted row is cut (docs/draw.md, 3).

What enters is every token with l > -inf in the total order: larger logit first, equal logits by lower id. Every filter
keeps a *prefix* of that order and returns its length; the first token is never removed; neutral filters are skipped.

- min_p(w, p): tokens with w >= p. Neutral 0.
- top_k: the first k of what is left; ties go to the lowest ids. Neutral: k >= V.
- top_p(q, P): the shortest prefix whose mass reaches max(1, ceil(P * Q / 2^32)), Q the mass of what is left. Neutral
2^32.

Agreement of kernel and reference: *set*, and as the set is an exact function of integers, the same ids bit for bit.
"""

from klero.sampling.filters.reference import cuts, min_p, needed_mass, top_p, total_order

__all__ = ["cuts", "min_p", "needed_mass", "top_p", "total_order"]
