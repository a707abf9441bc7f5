"""Counts from the history: the definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def counts_of(prompt_ids: Sequence[int], output_ids: Sequence[int], counted_from: int) -> dict[int, int]:
    """Every id that occurred, the first to occur first, with how often it counts: in the prompt from `counted_from` on,
    and in the output."""
    counted = Counter([*prompt_ids[counted_from:], *output_ids])
    return {token_id: counted[token_id] for token_id in [*prompt_ids, *output_ids]}
