"""What became of a row (docs/draw.md, 7)."""

from __future__ import annotations

from collections.abc import Sequence

OK = 0
BAD = 1  # NaN or +inf in the model's row
EMPTY = 2  # every token is -inf
FAILED = 3  # a processor or a filter of the caller's own raised, or returned what it may not

NO_TOKEN = -1


def message(status: int, position: int, rules: Sequence[str] = ()) -> str:
    """Say what is wrong with a row. rules: those that banned tokens on it."""
    if status == BAD:
        return f"the model's logits for position {position} hold NaN or +inf; the row cannot be drawn"
    by = f" after the bans of {', '.join(rules)}" if rules else ""
    return f"no token is left for position {position}{by}: every logit is -inf"
