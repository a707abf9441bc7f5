"""Patches: the tokens of a row that its rules list, with their rewritten logits, found without copying the row.

list_patches(rules, slot, V, room): one patch per listed token, chained by block, with the bias, the count and the ban
that the rules of the slot put on it. read_rewritten(view, room, ...): one pass over the model's row that computes the
patched logits (bias -> penalties -> bans, as in rewrite/order.py), fills the block maxima of the row as rewritten, and
checks the model's own row for NaN and +inf, banned tokens included. Cost: the plain pass, plus the listed tokens, plus
the blocks whose largest token changed. Agreement with rewrite/order.py: *bits*.
"""
