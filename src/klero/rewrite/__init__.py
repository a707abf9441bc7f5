"""Logits in, logits out: what rewrites a row before it is sampled.

So far one rule: the bans of min_tokens. Rows without a rule are never copied and never come here.
"""

from klero.rewrite.bans import Bans, rewrite_rows

__all__ = ["Bans", "rewrite_rows"]
