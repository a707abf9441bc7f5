"""Patches: the rules of a slot, written into a copy of the blocks that they touch.

patch_listed(view, rules, slot): bias -> penalties -> bans, as in rewrite/order.py, on the tokens that the rules list.
settle(view, widest): the mask, and the block maxima of the row as rewritten. Cost: the listed tokens, and a copy of
their blocks or of those that the mask changes. Agreement with rewrite/order.py: *bits*.
"""
