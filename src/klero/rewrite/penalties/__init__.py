"""Penalties: tokens that occurred get another logit, once per token and not once per occurrence.

repetition, for every token of prompt and output: l * (1/r) where l >= 0, else l * r, with r and 1/r rounded to binary32
on the host. Then, where the count c is above 0: l - (presence + frequency * c), rounded after each of the three
operations. c counts occurrences in the output, and with `prompt_ignore_length` n those in the prompt after its first n
tokens. Tokens that did not occur keep their bits; -inf stays -inf; an overflow from a finite logit becomes the largest
finite value of its sign. Agreement of kernel and reference: *bits*.
"""

from klero.rewrite.penalties.reference import PENALTIES, Penalties, penalties_of

__all__ = ["PENALTIES", "Penalties", "penalties_of"]
