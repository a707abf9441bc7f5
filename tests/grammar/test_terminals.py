"""What the terminals of a Lark grammar cost, written out."""

from __future__ import annotations

import re

import pytest

from klero.grammar.terminals import _bodies, _weights, check_regex, check_terminals


def weights(text):
    bodies = _bodies(text, lambda schema: None)
    return dict(zip(bodies, _weights(bodies), strict=True))


@pytest.mark.parametrize(
    "text, found",
    [
        ('start: A B?\nA: "a"? B B // C?\nB: "b"* | ""', {"A": (20, 5), "B": (7, 2)}),  # a rule costs nothing here
        ('start: /a?b*/ "x"?', {"/0": (6, 2)}),
        ('A.3: "?*"\nB[lazy]: A+\n!c: A?', {"A": (4, 0), "B": (6, 1)}),
        ('A: ("a" | )', {"A": (6, 1)}),
        ('A: "a" |\nB: | "b"', {"A": (4, 1), "B": (4, 1)}),
        ('A: "\\"?" /[?]\\/?/i # "?', {"A": (14, 2)}),
    ],
)
def test_weights_by_eye(text, found):
    assert weights(text) == found


def test_a_terminal_weighs_what_it_names_each_time():
    text = 'T0: "a"?\n' + "".join(f"T{i}: T{i - 1} T{i - 1}\n" for i in range(1, 10))
    assert weights(text)["T9"][1] == 512
    with pytest.raises(ValueError, match="too many pieces of its terminals may be left out"):
        check_terminals(text + "T10: T9 T9\n", lambda schema: None)


@pytest.mark.parametrize(
    "text, rule",
    [
        (
            'T0: "abc"\n' + "".join(f"T{i}: " + f"T{i - 1} " * 40 + "\n" for i in range(1, 5)),
            "longer than 1000000 piec",
        ),
        ("start: A\nA: " + '"a"? ' * 1001, "too many pieces of its terminals"),
        ("start: /" + "a?" * 1001 + "/", "too many pieces of its terminals"),
        ("start: A B\nA: /" + "a?" * 800 + "/\nB: /" + "b?" * 800 + "/", "too many pieces of its terminals"),
        ("start: /" + "a" * 20_000 + "/ /" + "b" * 20_000 + "/", "may have 32768 bytes in all"),
        ("start: %json {", "no JSON follows %json"),
    ],
)
def test_what_costs_too_much_is_refused(text, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        check_terminals(text, lambda schema: None)


def test_the_schemas_of_a_grammar_are_checked():
    found = []
    check_terminals('start: %json{"a": "%json {"} b\nb: "%json" %json\n true // %json', found.append)
    assert found == [{"a": "%json {"}, True]


def test_a_regular_expression_has_a_length():
    check_regex("a" * 32_768)
    with pytest.raises(ValueError, match="may have 32768 bytes"):
        check_regex("a" * 32_769)
    with pytest.raises(ValueError, match="1001 of its pieces may be left out"):
        check_regex("a?" * 1001)
