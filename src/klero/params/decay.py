"""Top-p decay: how P follows the accepted tokens, in integers of 2^32 (docs/draw.md, 3).

P depends on the output tokens alone, so a run that is preempted, rewound or continued computes it again from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from klero.params.row import TOP_P_OFF, round_fraction

LEAST_UNLESS_ASKED = 1e-6
NO_RESET = -1


class Decay(NamedTuple):
    """What moves P. start: P of the first token. factor: D, below 2^32. least: Pmin. reset_id: a token, -1 for none."""

    start: int
    factor: int
    least: int
    reset_id: int = NO_RESET


def resolve_decay(
    top_p: float | None, top_p_decay: float | None, top_p_min: float | None, top_p_reset_id: int | None
) -> Decay | None:
    """Round the fields of the decay; None where P never moves (not asked, or D = 2^32)."""
    factor = TOP_P_OFF if top_p_decay is None else round_fraction(top_p_decay)
    if factor == TOP_P_OFF:
        return None
    start = TOP_P_OFF if top_p is None else round_fraction(top_p)
    least = round_fraction(LEAST_UNLESS_ASKED if top_p_min is None else top_p_min)
    return Decay(start, factor, least, NO_RESET if top_p_reset_id is None else top_p_reset_id)


def next_top_p(top_p: int, decay: Decay, token_id: int) -> int:
    """P after a token: the start if it is the reset id, else max(floor(P * D / 2^32), Pmin). All below 2^64."""
    if token_id == decay.reset_id:
        return decay.start
    return max(top_p * decay.factor >> 32, decay.least)


def top_p_after(decay: Decay, output_ids: Iterable[int]) -> int:
    """P of the token that follows these output tokens."""
    top_p = decay.start
    for token_id in output_ids:
        top_p = next_top_p(top_p, decay, int(token_id))
    return top_p
