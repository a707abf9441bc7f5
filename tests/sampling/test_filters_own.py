"""Filters of one's own: what they see, what they may return, and what becomes of a row whose filter fails."""

import reprlib

import numpy as np
import pytest

from klero import SamplingParams
from klero.sampling.filters import SortedRow
from klero.sampling.fused.reference import sample_row
from klero.sampling.status import FAILED, OK

LOGITS = np.float32([1, 3, -np.inf, 3, 0])
ORDER = [1, 3, 0, 4]


def drawn(*filters, **fields):
    return sample_row(LOGITS, SamplingParams(temperature=1, **fields).row, 1, 2, 0, filters=filters)


def test_a_filter_sees_the_row_in_the_total_order():
    seen = []
    sample_row(LOGITS, SamplingParams(temperature=2).row, 1, 2, 0, filters=[lambda row: seen.append(row) or len(row)])
    (row,) = seen
    assert isinstance(row, SortedRow)
    assert row.ids.tolist() == ORDER
    assert row.logits.tolist() == [3, 3, 1, 0]
    assert row.scaled.tolist() == [0, 0, -1, -1.5]
    np.testing.assert_allclose(row.weights, np.exp([0, 0, -1, -1.5]), rtol=1e-6)
    assert row.masses[0] == 2**40
    assert row.mass == int(row.masses.sum())
    assert [a.dtype.name for a in (row.ids, row.logits, row.scaled, row.weights, row.masses)] == [
        "int64", "float32", "float32", "float32", "uint64",
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["ids", "logits", "scaled", "weights", "masses"])
def test_a_filter_cannot_write_to_the_row(field):
    def write(row):
        getattr(row, field)[0] = 0
        return 1

    assert drawn(write).status == FAILED


@pytest.mark.parametrize(
    "result, kept",
    [
        (1, [1]),
        (3, [1, 3, 0]),
        (np.int32(2), [1, 3]),
        (np.array(4), ORDER),
        ([False, True, True, False], [3, 0]),
        (np.array([False, False, False, True]), [4]),
    ],
)
def test_what_a_filter_may_return(result, kept):
    row = drawn(lambda _: result)
    assert (row.status, row.kept.tolist(), row.message) == (OK, kept, None)
    assert row.token in kept


@pytest.mark.parametrize(
    "result",
    [
        0, 5, -1, True, np.True_, 2.0, None, "2", [1, 0, 1, 0], [True] * 3, [True] * 5, [False] * 4, [], {},
        np.ones((4, 1), bool), np.array(True), [[1], [2, 3]], 2**70,
    ],
    ids=str,
)  # fmt: skip
def test_anything_else_is_an_error_of_that_row(result):
    def mine(row):
        return result

    row = drawn(mine)
    assert (row.status, row.token, len(row.kept)) == (FAILED, -1, 0)
    shown = " ".join(reprlib.repr(result).split())
    rule = "it must return how many leading tokens stay, an int in 1 .. 4, or a bool [4] that marks at least one"
    assert row.message == f"filters: mine returned {shown}; {rule}"


def test_an_exception_is_an_error_of_that_row():
    class Mine:
        def __call__(self, row):
            raise KeyError("lost")

    row = drawn(len, Mine())
    assert (row.status, row.token) == (FAILED, -1)
    assert row.message == "filters: Mine raised KeyError: 'lost'"
    assert row.stages == (("len", 4),)


def test_filters_run_in_their_order_before_the_others_and_each_sees_what_is_left():
    seen = []

    def without_first(row):
        seen.append(row.ids.tolist())
        return np.arange(len(row)) > 0

    row = drawn(without_first, without_first, top_k=1 + 1)
    assert seen == [ORDER, ORDER[1:]]
    assert row.kept.tolist() == [0, 4]
    assert row.stages == (("without_first", 3), ("without_first", 2), ("top-k", 2))
    assert row.mass > row.masses[0] > row.masses[1] == row.masses[2] > 0


def test_what_is_left_is_weighed_anew():
    seen = []
    drawn(lambda row: row.ids == 0, lambda row: seen.append(row) or 1)
    assert (seen[0].scaled.tolist(), seen[0].masses.tolist()) == ([0], [2**40])


def test_a_greedy_row_asks_no_filter():
    greedy = SamplingParams(temperature=0, filters=len)
    assert sample_row(LOGITS, greedy.row, 1, 2, 0, filters=greedy.filters).stages == (("greedy", 1),)
