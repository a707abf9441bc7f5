"""Matchers of slots: their masks, begun or not, what one that fails costs, and drafts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.grammar.words import OneOf, bits

from klero.grammar.masks import Masks
from klero.grammar.matchers import Matchers, fill_drafts

END = 2
ROWS = np.array([0, 1, 2], np.int32)


def seated(**of_slot):
    """s0=..., s1=...: the matchers of slots."""
    matchers = Matchers(40)
    for name, matcher in of_slot.items():
        matchers.start(int(name[1:]), lambda made=matcher: made, ())
    return matchers


def allowed(masks, r):
    """The ids a row allows; None: it has no mask."""
    words = masks.row(r)
    return None if words is None else bits(words, 40)


def take(matchers, *pairs):
    matchers.append(*(np.array(each, np.int32) for each in zip(*pairs, strict=True)))


def test_each_row_has_the_mask_of_its_slot():
    matchers = seated(s0=OneOf([[3, 4]], {END}), s2=OneOf([[35], []], {END}))
    masks, failed = matchers.masks(ROWS)
    assert [allowed(masks, r) for r in ROWS] == [{3}, None, {35, END}]
    assert failed == {}
    assert len(masks.words) == 2  # nobody else pays
    take(matchers, (0, 3), (1, 9), (2, END))
    masks, _ = matchers.masks(ROWS[::-1])
    assert [allowed(masks, r) for r in ROWS] == [{END}, None, {4}]


def test_what_was_begun_is_what_would_be_made_now():
    class Slow(OneOf):
        def fill(self, words):
            assert threading.current_thread().name.startswith("klero-masks") is self.begun
            super().fill(words)

    slow = Slow([[3, 4]], {END})
    matchers = seated(s1=slow)
    slow.begun = True
    matchers.begin(ROWS)
    begun = matchers.masks(ROWS)[0]
    slow.begun = False
    now = matchers.masks(ROWS)[0]
    assert (begun.words.tolist(), begun.of_row.tolist()) == (now.words.tolist(), now.of_row.tolist())
    assert now.of_row.tolist() == [-1, 0, -1]


@pytest.mark.parametrize("change", ["append", "reset", "rewind", "start", "others", "twice"])
def test_what_was_begun_before_a_change_is_made_anew(change):
    matchers = seated(s0=OneOf([[3, 4]], {END}))
    take(matchers, (0, 3))
    matchers.begin(ROWS)
    rows, expected = ROWS, {4}
    if change == "append":
        take(matchers, (0, 4))
        expected = {END}
    elif change == "reset":
        matchers.reset(0)
        expected = None
    elif change == "rewind":
        matchers.rewind(0, 1)
        expected = {3}
    elif change == "start":
        matchers.start(0, lambda: OneOf([[7]], {END}), ())
        expected = {7}
    elif change == "others":
        rows = ROWS[:1]
    else:
        matchers.begin(ROWS)
    assert allowed(matchers.masks(rows)[0], 0) == expected


def test_one_that_fails_costs_its_own_row_alone():
    matchers = seated(s0=OneOf([[3]], {END}, fails_at=0), s1=OneOf([[3]], {END}))
    for _ in range(2):
        masks, failed = matchers.masks(ROWS)
        assert failed == {0: "grammar: RuntimeError: no mask here"}
        assert [allowed(masks, r) for r in ROWS] == [set(), {3}, None]


def test_a_token_that_may_not_come_is_the_end_of_its_slot():
    matchers = seated(s0=OneOf([[3]], {END}), s1=OneOf([[3]], {END}))
    take(matchers, (0, 5), (1, 3))
    take(matchers, (0, 3), (1, END))  # nothing heals it
    masks, failed = matchers.masks(ROWS)
    assert failed == {0: "grammar: token 5 may not come here"}
    assert allowed(masks, 1) == {END}
    matchers.reset(0)
    assert matchers.masks(ROWS)[1] == {}


def test_a_matcher_reads_what_was_generated_before():
    matchers = Matchers(40)
    matchers.start(0, lambda: OneOf([[3, 4, 5]], {END}), [3, 4])
    assert allowed(matchers.masks(ROWS)[0], 0) == {5}


@pytest.mark.parametrize(
    ("make", "before", "message"),
    [
        (lambda: OneOf([[3]], {END}), [9], "grammar: token 9 was generated before, where it may not come"),
        (lambda: 1 // 0, [], "grammar: ZeroDivisionError"),
        (lambda: None, [3], "grammar: AttributeError"),
    ],
)
def test_one_that_cannot_begin_costs_its_own_row_alone(make, before, message):
    """So a sequence that is seated anew, after a preemption or a step that failed, takes nobody along."""
    matchers = seated(s1=OneOf([[3]], {END}))
    matchers.start(0, make, before)
    for _ in range(2):
        masks, failed = matchers.masks(ROWS)
        assert failed[0].startswith(message)
        assert (allowed(masks, 0), allowed(masks, 1), list(failed)) == (set(), {3}, [0])
        take(matchers, (0, 3))
        matchers.rewind(0, 1)
    matchers.reset(0)
    assert matchers.masks(ROWS)[1] == {}


def test_a_refused_token_is_taken_back_like_any_other():
    matcher = OneOf([[3, 4]], {END})
    matchers = seated(s0=matcher)
    take(matchers, (0, 3))
    for token_id in (9, 4, 4):
        take(matchers, (0, token_id))
    matchers.rewind(0, 2)
    assert matchers.masks(ROWS)[1] == {0: "grammar: token 9 may not come here"}
    matchers.rewind(0, 1)
    assert (matcher.taken, allowed(matchers.masks(ROWS)[0], 0)) == ([3], {4})
    take(matchers, (0, 9))
    matchers.rewind(0, 2)  # the refused one and one before
    assert matcher.taken == []


class AtOnce:
    """A batch that fills by itself, or fails."""

    def __init__(self, fails=None):
        self.fails, self.calls = fails, 0

    def fill_all(self, matchers, masks):
        self.calls += 1
        if self.fails:
            return self.fails()
        for matcher, words in zip(matchers, masks, strict=True):
            matcher.fill(words)
        return [None] * len(matchers)


@pytest.mark.parametrize("fails", [None, lambda: 1 // 0, lambda: None, list])
def test_a_batch_that_fails_is_done_one_by_one(fails):
    batch, matchers = AtOnce(fails), [OneOf([[token_id]], {END}) for token_id in (3, 4, 5)]
    for matcher in matchers[:2]:
        matcher.batch = batch
    masks, failed = seated(s0=matchers[0], s1=matchers[1], s2=matchers[2]).masks(ROWS)
    assert [allowed(masks, r) for r in ROWS] == [{3}, {4}, {5}]
    assert (failed, batch.calls) == ({}, 1)


def test_what_fill_returns_and_what_a_batch_is_not_harm_nobody():
    class Odd(OneOf):
        @property
        def batch(self):
            raise ZeroDivisionError

        def fill(self, words):
            super().fill(words)
            return True

    five = OneOf([[4]], {END})
    five.batch = 5
    masks, failed = seated(s0=Odd([[3]], {END}), s1=five).masks(ROWS)
    assert ([allowed(masks, r) for r in ROWS], failed) == ([{3}, {4}, None], {})


def test_after_the_end_masks_are_made_all_the_same():
    matchers = seated(s0=OneOf([[3]], {END}))
    matchers.begin(ROWS)
    thread = matchers._thread
    matchers.close()
    assert allowed(matchers.masks(ROWS)[0], 0) == {3}
    with pytest.raises(RuntimeError):
        thread.submit(int)


def test_without_matchers_nothing_is_made():
    matchers = Matchers(40)
    matchers.begin(ROWS)
    masks, failed = matchers.masks(ROWS)
    assert (masks.words.shape, masks.of_row.tolist(), failed) == ((0, 2), [-1, -1, -1], {})


def test_masks_join():
    """Tokens 0-3 of 4 rows; left: allow-lists, right: grammars."""
    left = Masks(np.array([[0b0011], [0b1000]], np.int32), np.array([0, -1, 1, -1], np.int32))
    right = Masks(np.array([[0b0110], [0b1100]], np.int32), np.array([0, 1, -1, -1], np.int32))
    for joined in (left.joined(right), right.joined(left)):
        assert [None if joined.row(r) is None else joined.row(r).tolist() for r in range(4)] == [
            [0b0010], [0b1100], [0b1000], None,
        ]  # fmt: skip
    none = Masks.none(4, 4)
    assert left.joined(none) is left
    assert none.joined(left) is left
    assert Masks.given(np.array([[-1], [5]], np.int32)).of_row.tolist() == [-1, 1]


def test_rows_of_drafts():
    """GR-04 in small: '[' digit ']' as 3, 4-5, 6."""
    matcher = OneOf([[3, 4, 6], [3, 5, 6]], {END})
    words = np.full((4, 2), -1, np.int32)
    assert fill_drafts(matcher, [3, 9, 6], words) == 2
    assert [bits(row, 40) for row in words] == [{3}, {4, 5}, set(), set()]
    assert matcher.taken == []
    assert fill_drafts(matcher, [3, 5, 6], words) == 4
    assert [bits(row, 40) for row in words] == [{3}, {4, 5}, {6}, {END}]
    assert fill_drafts(matcher, [], words[:1]) == 1
    matcher.accept(3)
    assert fill_drafts(matcher, [7], words[:2]) == 1
    assert matcher.taken == [3]


def test_a_matcher_that_fails_among_drafts_is_left_where_it_was():
    matcher = OneOf([[3, 4, 6]], {END}, fails_at=2)
    with pytest.raises(RuntimeError):
        fill_drafts(matcher, [3, 4, 6], np.zeros((4, 2), np.int32))
    assert matcher.taken == []
