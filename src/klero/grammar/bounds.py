"""Numbers of a schema: bounds in digits that can be told apart, and multiples."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
NUM_DIGITS = 15
MAX_MULTIPLE = 20_000


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(key: str, value: Any) -> None:
    """Raise ValueError for a value of one of NUMBERS that means nothing."""
    if not is_number(value):
        raise ValueError(f"must be a number, and is {value!r:.40}")
    if key == "multipleOf" and value <= 0:
        raise ValueError(f"must be above 0, and is {value!r:.40}")
    if key == "multipleOf" and num_remainders(value) > MAX_MULTIPLE:
        raise ValueError(f"its digits may be {MAX_MULTIPLE} at most, apart from zeros and the decimal point")


def has_few_digits(number: float) -> bool:
    """Whether a number can be told apart from its neighbours."""
    return _rounded(number, ROUND_FLOOR, False) == number


def num_remainders(number: int | float) -> int:
    """The significant digits of a number, as an integer: how many states tell its multiples apart."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))


def no_number(schema: dict[str, Any]) -> bool:
    """Whether a number is asked for and no multiple of multipleOf lies between the bounds."""
    if schema.get("type") not in ("integer", "number") or "multipleOf" not in schema:
        return False
    exact = {key: Fraction(str(schema[key])) for key in NUMBERS if key in schema}
    step = exact["multipleOf"]
    if schema["type"] == "integer":
        step = Fraction(step.numerator)  # the smallest multiple of it that is an integer
    above, below = exact.get("exclusiveMinimum"), exact.get("exclusiveMaximum")
    least = max((exact[key] for key in ("minimum", "exclusiveMinimum") if key in exact), default=None)
    most = min((exact[key] for key in ("maximum", "exclusiveMaximum") if key in exact), default=None)
    if least is None or most is None:
        return False
    first, last = math.ceil(least / step), math.floor(most / step)
    return first + (first * step == above) > last - (last * step == below)


def with_closed_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Say bounds of numbers in few digits, and open ones by the next such number, inwards."""
    made = dict(schema)
    for closed, opened, rounding, inner in (
        ("minimum", "exclusiveMinimum", ROUND_CEILING, max), ("maximum", "exclusiveMaximum", ROUND_FLOOR, min),
    ):  # fmt: skip
        found = [_rounded(made.pop(key), rounding, key == opened) for key in (closed, opened) if key in made]
        if found:
            made[closed] = inner(found)
    return made


def _rounded(bound: float, rounding: str, is_open: bool) -> float:
    """The outermost number of few digits within a bound: llguidance rounds the others outwards, and a reader rounds
    one with more digits to the bound itself."""
    exact = Decimal(str(bound))
    step = Decimal(1).scaleb(max(exact.adjusted() - NUM_DIGITS + 1, -NUM_DIGITS))
    found = exact.quantize(step, rounding)
    if is_open and found == exact:
        found += step if rounding == ROUND_CEILING else -step
    return int(found) if isinstance(bound, int) and not is_open else float(found)
