"""Patterns of a schema: their pieces, what is refused, and how many pieces may be left out."""

from __future__ import annotations

import re
import time

import pytest

from klero.grammar.patterns import MAX_OPTIONAL, MAX_PATTERN, held_pattern, num_optional, pieces_of


@pytest.mark.parametrize(
    "pattern, pieces",
    [
        (r"a\.[b\]]{2,3}?", ["a", r"\.", r"[b\]]", "{2,3}", "?"]),
        (r"\p{Lu}\x41\u{e9}\u00e9", [r"\p{Lu}", r"\x41", r"\u{e9}", r"\u00e9"]),
        ("a{,2}{", ["a", "{", ",", "2", "}", "{"]),
        ("", []),
    ],
)
def test_pieces(pattern, pieces):
    assert pieces_of(pattern) == pieces


@pytest.mark.parametrize(
    "pattern, rule",
    [
        ("a[b", "a set that '[' begins is not closed by ']'"),
        (r"\p{L", r"the name that \p{ begins is not closed"),
        (r"\u{41", r"the name that \u{ begins is not closed"),
        ("[]a]", "the set [] has more than one meaning"),
        ("[^]a]", "the set [^] has more than one meaning"),
        (r"\Aa", r"\A is an escape sequence that is not known"),
        (r"a\z", r"\z is an escape sequence that is not known"),
        (r"^\a$", r"\a is an escape sequence that is not known"),
        (r"[\Q]", r"\Q is an escape sequence that is not known"),
        (r"\ba", r"\b is look-around that cannot be held"),
        ("x{2}{3}", "the count '{3}' follows another one"),
        ("x**", "the count '*' follows another one"),
        ("x*+", "the count '+' follows another one"),
        ("x+??", "the count '?' follows another one"),
        ("x{2}?{3}", "the count '{3}' follows another one"),
        ("é" * (MAX_PATTERN // 2 + 1), f"a pattern may have {MAX_PATTERN} bytes"),
        ("a?" * (MAX_OPTIONAL + 1), f"{MAX_OPTIONAL + 1} of its pieces may be left out"),
        (5, "must be a regular expression"),
    ],
)
def test_what_not_all_read_alike_is_refused(pattern, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        held_pattern(pattern)


@pytest.mark.parametrize(
    "pattern, held",
    [
        ("x*?y+?z??", "x*?y+?z??"),
        ("(?:x?)*", "(?:x?)*"),
        (r"\<a\>", "<a>"),
        (r"a\{2}{3}", r"a\{2}{3}"),
        ("[ab]{2}", "[ab]{2}"),
        ("a?" * 9, "a?" * 9),
    ],
)
def test_what_all_read_alike_is_kept(pattern, held):
    assert held_pattern(pattern) == held


@pytest.mark.parametrize(
    "text, number",
    [
        ("abc", 0),
        ("a?b*c+d{2}", 4),
        ("(?:a)(?P<n>b)", 0),
        (r"\?\*[ab]", 0),
        ("(a|)", 1),
        ("(|a)", 1),
        ("(a||b)", 1),
        ("a|", 1),
        ("|a", 1),
        ("()", 1),
        ("(?:)", 1),
        ("(?i)a", 1),
        ("( | )", 2),  # white space means nothing under (?x)
    ],
)
def test_how_many_pieces_may_be_left_out(text, number):
    assert num_optional(text) == number


@pytest.mark.parametrize("piece", ["[", "\\p{", "\\u{", "\\x{", "[\\", "{1", "(?", "(|", "a?"])
def test_the_time_is_linear_in_the_length(piece):
    """In squares of it these would take minutes."""
    start = time.perf_counter()
    for text in (piece * 100_000, "a" + piece * 100_000):
        try:
            pieces_of(text)
        except ValueError:
            continue
        finally:
            num_optional(text)
    assert time.perf_counter() - start < 3
