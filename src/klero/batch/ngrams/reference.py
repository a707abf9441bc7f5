"""N-grams from the history: the definition."""

from __future__ import annotations

from collections.abc import Sequence


def followers(size: int, tokens: Sequence[int]) -> set[int]:
    """Every token that followed the last size - 1 tokens somewhere before."""
    tokens = list(tokens)
    last = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1)
    return {tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == last}
