"""Bias: what is added to logits, in binary32, before anything else looks at them.

l + b, one rounding. First `embedding_bias`, one number for every token, then `logit_bias`, for the listed ones. A bias
of -inf bans its token; -inf stays -inf; an overflow from a finite logit becomes the largest finite value of its sign.
Agreement of kernel and reference: *bits*.
"""
