"""Weights and masses: s, w, q of docs/draw.md section 2, and the logarithm of a mass (section 8).

s = (l - m) * r; w = exp32(s); q = floor(w * 2^40), a 64-bit integer. Masses are sums of q, so their value does not
depend on the order of the tokens, and blocks, threads and vocabulary shards add up to the same number. A mass of
2^22 tokens stays below 2^62. lse(Q) = log32(float32(Q) * 2^-40), Q > 0, converted in one rounding. Agreement: *bits*.
"""

from klero.lots.mass.reference import canonical, lse, masses, ordered_keys, scaled, weights

__all__ = ["canonical", "lse", "masses", "ordered_keys", "scaled", "weights"]
