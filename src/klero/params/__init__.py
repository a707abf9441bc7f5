"""What is asked: parameters, their rules, and what they come to for one row."""

from klero.params.row import NEUTRAL, ROW_DTYPE, RowParams, resolve_row, seed_bits, stack_rows
from klero.params.sampling_params import SamplingParams, check_seed

__all__ = [
    "NEUTRAL",
    "ROW_DTYPE",
    "RowParams",
    "SamplingParams",
    "check_seed",
    "resolve_row",
    "seed_bits",
    "stack_rows",
]
