"""exp32 and log32: binary32 exponential and logarithm with pinned arithmetic (docs/draw.md, 6).

exp32(x), x <= 0 or -inf: 0 below -87, exp32(0) = 1, monotone. log32(x), x > 0 and normal. Every product and sum is
rounded on its own; coefficients are those of Cephes' expf and logf. Anything else (NaN, x > 0 for exp32, zero or
subnormal for log32) is outside the contract. New array; agreement: *bits*.
"""

from klero.lots.pinned.reference import core, exp32, log32

__all__ = ["core", "exp32", "log32"]
