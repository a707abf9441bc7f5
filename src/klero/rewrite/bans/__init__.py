"""Bans: tokens that must not be drawn next. All of them meet in one mask; a banned token is -inf, and nothing lifts it.

A suffix rule bans the last token of a sequence where the history ends with the others; with one token it bans always.
bad_token_ids and bad_words: the prompt counts. min_tokens: end ids, stop ids and stop sequences, while fewer than
min_tokens tokens were generated, matched in the output alone; none of them where a mask allows an end id and nothing
else. no_repeat_ngram_size n: every token that once followed the last n - 1 tokens. allowed_token_ids and masks:
everything else. Agreement of kernel and reference: *set*.
"""

from klero.rewrite.bans.reference import bitmask, min_tokens_words

__all__ = ["bitmask", "min_tokens_words"]
