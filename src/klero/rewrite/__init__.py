"""Logits in, logits out: what rewrites a row before it is sampled. The order and its reasons: rewrite/order.py.

`rewrite_row` is the definition, in NumPy. `Rules` holds what rewrites the rows of each slot, for the kernels.
"""

from klero.rewrite.context import Context
from klero.rewrite.order import Rewritten, rewrite_row
from klero.rewrite.rules import RuleArrays, Rules

__all__ = ["Context", "Rewritten", "RuleArrays", "Rules", "rewrite_row"]
