"""What is asked: parameters, their rules, and what they come to for one row."""

from klero.params.decay import Decay, next_top_p, top_p_after
from klero.params.row import NEUTRAL, ROW_DTYPE, RowParams, resolve_row, rows_of_bytes, seed_bits
from klero.params.sampling_params import SamplingParams, check_seed
from klero.params.vectors import Vector

__all__ = [
    "NEUTRAL",
    "ROW_DTYPE",
    "Decay",
    "RowParams",
    "SamplingParams",
    "Vector",
    "check_seed",
    "next_top_p",
    "resolve_row",
    "rows_of_bytes",
    "seed_bits",
    "top_p_after",
]
