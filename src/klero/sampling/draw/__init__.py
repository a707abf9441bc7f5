"""The draw: every kept token draws its own lot, the largest score wins (docs/draw.md, 4 and 5).

score[i] = s[i] + lot[i]; the largest wins, the lowest id on a tie. This is Gumbel-max: one draw from the kept
tokens with probability proportional to exp(s). Statistics (best score, its id) merge by the same rule, so shards of a
vocabulary draw apart and agree. Agreement: *bits* of the score, *token*.
"""

from klero.sampling.draw.reference import draw

__all__ = ["draw"]
