"""Lots: the noise a token draws, and single uniform numbers (docs/draw.md, 4).

lot_of_word(x), x uint32: g = -log32(-L), never rising with x, in [-3.1299946, 22.873857], within 2e-7 * max(1, |g|) of
-ln(-ln(1 - (x + 0.5)/2^32)). uniform: word 0 of id 0 as (float(x) + 0.5) * 2^-32, in (0, 1]. Agreement: *bits*.
"""

from klero.lots.noise.reference import ACCEPT, COIN, DRAFT, DRAW, RESIDUAL, lot_of_word, lots_of_ids, uniform

__all__ = ["ACCEPT", "COIN", "DRAFT", "DRAW", "RESIDUAL", "lot_of_word", "lots_of_ids", "uniform"]
