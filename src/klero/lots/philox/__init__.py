"""Philox4x32-10: the counter-based generator of Salmon et al. (SC11), as docs/draw.md section 4 lays out its counter.

key = (low, high word of the seed); counter = (token id >> 2, position, child, purpose); token i takes word i & 3.
New arrays of uint32; agreement: *bits*.
"""

from klero.lots.philox.reference import philox4x32, words_of_ids

__all__ = ["philox4x32", "words_of_ids"]
