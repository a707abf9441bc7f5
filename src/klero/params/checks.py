"""The rules of rules.md, one small check per kind of field.

A check takes the value as given and returns it normalised (lists become tuples, NumPy scalars become Python's), or
raises `Broken` with the rule and the way out. `SamplingParams` collects every `Broken` of a request into one
`ParameterError`.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from klero.params.vectors import Vector

Check = Callable[[Any], Any]
DECIMAL = re.compile(r"-?[0-9]{1,20}")


class Broken(Exception):
    """A rule that a value breaks; its text is the rule."""


def as_number(value: Any, rule: str) -> float:
    """The value as a Python float, infinities included; bool, text and NaN are refused with `rule`."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_") or not isinstance(value, numbers.Real):
        raise Broken(rule)
    try:
        number = float(value)
    except OverflowError:
        raise Broken(rule) from None
    if math.isnan(number):
        raise Broken(rule)
    return number


def real(
    low: float, high: float, *, low_open: bool = False, high_open: bool = False, off: float | None = None
) -> Check:
    """A finite real number in [low, high], with an open end (low, high] or [low, high), or the number `off`."""
    rule = f"must be a number in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    rule += "" if off is None else f", or {off:g} (off)"

    def check(value: Any) -> float:
        number = as_number(value, rule)
        inside = low <= number <= high and not (low_open and number == low) and not (high_open and number == high)
        if not inside and number != off:
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
    """True or False, Python's or NumPy's, and nothing that merely looks like it."""
    if not isinstance(value, bool | np.bool_):
        raise Broken("must be True or False")
    return bool(value)


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


def allowed_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids that is not empty; sorted, each once."""
    ids = token_ids(value)
    if not ids:
        raise Broken("must be a list of at least one token id (leave it out to allow every token)")
    return tuple(sorted(set(ids)))


def listed_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids in the order given; a repeated one counts once."""
    return tuple(dict.fromkeys(token_ids(value)))


def one_of(*words: str) -> Check:
    """One of these words."""
    rule = f"must be {' or '.join(map(repr, words))}"

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise Broken(rule)
        return str(value)

    return check


def strings(what: str) -> Check:
    """A string or a list of strings, none of them empty (an empty one would match everywhere)."""
    rule = f"must be a non-empty string or a list of non-empty strings (leave it out for no {what})"

    def check(value: Any) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else items_of(value, rule)
        if any(not isinstance(text, str) or not text for text in texts):
            raise Broken(rule)
        return tuple(dict.fromkeys(texts))

    return check


def callables(value: Any) -> tuple[Callable[..., Any], ...]:
    """A callable or a list of callables."""
    rule = "must be a callable or a list of callables"
    given = [value] if callable(value) else items_of(value, rule)
    if not all(callable(item) for item in given):
        raise Broken(rule)
    return tuple(given)


def logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping from token id (JSON brings it as text) to a number that binary32 can hold, or -inf; sorted by id."""
    rule = "must be a mapping from token ids (integers >= 0) to finite numbers of binary32, or -inf for a ban"
    pairs = list(value.items()) if isinstance(value, Mapping) else [_pair(item, rule) for item in items_of(value, rule)]
    entries: dict[int, float] = {}
    for key, bias in pairs:
        token_id = int(key) if isinstance(key, str) and DECIMAL.fullmatch(key) else as_integer(key, rule)
        number = as_number(bias, rule)
        if token_id < 0 or not (number == -math.inf or _fits_binary32(number)):
            raise Broken(rule)
        if token_id in entries:
            raise Broken(f"must be a mapping that names no token twice, and {token_id} is there twice")
        entries[token_id] = number
    return tuple(sorted(entries.items()))


def vector(value: Any) -> Vector:
    """A list or array of one number for each token, each finite in binary32 or -inf."""
    given = value
    if isinstance(given, Vector):
        value = given.array
    rule = "must be a list or array [vocabulary] of finite numbers of binary32, or -inf for a ban"
    if isinstance(value, str | bytes | Mapping | set | frozenset):
        raise Broken(rule)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists; what a tensor library says of its own tensors
        raise Broken(rule) from None
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "fiu" or _has_bool(value):
        raise Broken(rule)
    with np.errstate(over="ignore"):
        rounded = array.astype(np.float32)
    if not (np.isfinite(rounded) | np.isneginf(array)).all():
        raise Broken(rule)
    return given if isinstance(given, Vector) else Vector(rounded)


def optional(check: Check) -> Check:
    """The check, or None for "not asked"."""
    return lambda value: None if value is None else check(value)


def none_is(neutral: Any, check: Check) -> Check:
    """The check, with None read as the neutral value."""
    return lambda value: neutral if value is None else check(value)


def _pair(item: Any, rule: str) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise Broken(rule)
    return item[0], item[1]


def _fits_binary32(number: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float32(number)))


def _has_bool(values: Any) -> bool:
    """Whether a list mixes True or False among its numbers, which an array would hide."""
    return isinstance(values, list | tuple) and any(isinstance(value, bool | np.bool_) for value in values)
