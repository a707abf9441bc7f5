"""Helpers for testing engines and kernels against klero: grades of agreement, laws of draws, nasty rows, toy models.

Grades, from the strictest: *bits* (`assert_bits`: every bit equal), *set* (`assert_set`: the same ids kept), *token*
(`assert_token`: the same token drawn), *law* (`assert_draws`: tokens come as often as they should, at a stated
false-alarm rate). Toy models are in `klero.testing.models`.
"""

from klero.testing.grades import assert_bits, assert_set, assert_token
from klero.testing.laws import assert_draws, chi_square_tail, distribution, goodness_of_fit
from klero.testing.rows import ROW_KINDS, nasty_params, nasty_row, nasty_rows

__all__ = [
    "ROW_KINDS",
    "assert_bits",
    "assert_draws",
    "assert_set",
    "assert_token",
    "chi_square_tail",
    "distribution",
    "goodness_of_fit",
    "nasty_params",
    "nasty_row",
    "nasty_rows",
]
