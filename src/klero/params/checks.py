"""The rules of rules.md, one small check per kind of field.

A check takes the value as given and returns it normalised (lists become tuples, NumPy scalars become Python's), or
raises `Broken` with the rule and the way out. `SamplingParams` collects every `Broken` of a request into one
`ParameterError`.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[[Any], Any]


class Broken(Exception):
    """A rule that a value breaks; its text is the rule."""


def real(low: float, high: float, *, low_open: bool = False) -> Check:
    """A finite real number in [low, high] (or (low, high]); bool, text, NaN and infinities are refused."""
    rule = f"must be a number in {'(' if low_open else '['}{low:g}, {high:g}]"

    def check(value: Any) -> float:
        if isinstance(value, bool) or type(value).__name__ == "bool_" or not isinstance(value, numbers.Real):
            raise Broken(rule)
        try:
            number = float(value)
        except OverflowError:
            raise Broken(rule) from None
        if not math.isfinite(number) or number < low or number > high or (low_open and number == low):
            raise Broken(rule)
        return number

    return check


def as_integer(value: Any, rule: str) -> int:
    """The value as a Python int; bool, float and text are refused with `rule`."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise Broken(rule)
    try:
        return operator.index(value)
    except TypeError:
        raise Broken(rule) from None


def integer(low: int, high: int | None = None, *, way_out: str = "") -> Check:
    """An integer in [low, high]."""
    span = f">= {low}" if high is None else f"in [{low}, {high}]"
    rule = f"must be an integer {span}" + (f" ({way_out})" if way_out else "")

    def check(value: Any) -> int:
        number = as_integer(value, rule)
        if number < low or (high is not None and number > high):
            raise Broken(rule)
        return number

    return check


def boolean(value: Any) -> bool:
    """True or False and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise Broken("must be True or False")
    return value


def items_of(value: Any, rule: str) -> list[Any]:
    """The entries of a list, tuple, set or array; text, bytes, mappings and single numbers are refused."""
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise Broken(rule)
    try:
        return list(value)
    except TypeError:  # a zero-dimensional array
        raise Broken(rule) from None


def token_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids, each >= 0; the upper bound is the logits width, checked when the request meets a model."""
    rule = "must be a list of token ids (integers >= 0)"
    ids = tuple(as_integer(item, rule) for item in items_of(value, rule))
    if any(i < 0 for i in ids):
        raise Broken(rule)
    return ids


def end_ids(value: Any) -> tuple[int, ...]:
    """One token id or a list of them (a model's configuration has either)."""
    return token_ids(value if isinstance(value, Iterable) else [value])


def token_sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    """A list of token ids or of id sequences; every entry becomes a sequence."""
    rule = "must be a list whose entries are token ids (integers >= 0) or non-empty lists of them"
    sequences = []
    for item in items_of(value, rule):
        if isinstance(item, Iterable) and not isinstance(item, str | bytes):
            sequence = token_ids(item)
        else:
            sequence = token_ids([item])
        if not sequence:
            raise Broken(rule)
        sequences.append(sequence)
    return tuple(dict.fromkeys(sequences))


def stop_strings(value: Any) -> tuple[str, ...]:
    """A string or a list of strings, none of them empty (an empty stop would match everywhere)."""
    rule = "must be a non-empty string or a list of non-empty strings (leave it out for no stop)"
    texts = [value] if isinstance(value, str) else items_of(value, rule)
    if any(not isinstance(text, str) or not text for text in texts):
        raise Broken(rule)
    return tuple(dict.fromkeys(texts))


def optional(check: Check) -> Check:
    """The check, or None for "not asked"."""
    return lambda value: None if value is None else check(value)


def none_is(neutral: Any, check: Check) -> Check:
    """The check, with None read as the neutral value."""
    return lambda value: neutral if value is None else check(value)
