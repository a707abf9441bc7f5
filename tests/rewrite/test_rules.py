"""Rules by slot: what they remember of a history, forward and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import SamplingParams
from klero.batch import History
from klero.batch.counts.reference import counts_of
from klero.batch.ngrams.cpu import newest
from klero.batch.ngrams.reference import followers
from klero.device import HAVE_NUMBA
from klero.rewrite import Context, Rules

if not HAVE_NUMBA:
    pytest.skip("needs Numba; the reference reads the history", allow_module_level=True)

EVERYTHING = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, no_repeat_ngram_size=2)


class Seats:
    """Histories and their rules, as the sampler drives them."""

    def __init__(self, num_slots=1, width=50, max_len=64):
        self.history = History(num_slots, max_len)
        self.rules = Rules(num_slots, width, self.history)

    def start(self, index, params, prompt, output=()):
        self.history.start(index, prompt, output)
        self.rules.start(index, Context(params, np.array(prompt, np.int32), np.array(output, np.int32)))

    def append(self, index, *token_ids):
        for token_id in token_ids:
            self.history.append(np.array([index]), np.array([token_id], np.int32))
            self.rules.append(np.array([index]), np.array([token_id], np.int32))

    def rewind(self, index, length):
        self.rules.rewind(index, length)
        self.history.rewind(index, length)

    def seen(self, index=0):
        """The counts that a kernel finds."""
        arrays = self.rules.arrays()
        n = arrays.num_seen[index]
        return dict(zip(arrays.seen_ids[index, :n].tolist(), arrays.seen_counts[index, :n].tolist(), strict=True))

    def banned(self, index=0):
        """The followers that a kernel finds."""
        arrays, found = self.rules.arrays(), set()
        position = newest(
            arrays.history[index], arrays.lengths[index], arrays.ngram_sizes[index], arrays.ngram_index[index],
            arrays.ngram_log2_used[index],
        )  # fmt: skip
        while position >= 0:
            found.add(int(arrays.history[index, position]))
            position = int(arrays.ngram_previous[index, position]) - 1
        return found


def test_rejected_drafts_leave_no_trace():
    seats = Seats()
    seats.start(0, EVERYTHING, [7, 8], [9, 7])
    assert (seats.seen(), seats.banned()) == ({7: 1, 8: 0, 9: 1}, {8})
    seats.append(0, 5, 9, 7)
    assert (seats.seen(), seats.banned()) == ({7: 2, 8: 0, 9: 2, 5: 1}, {8, 5})
    seats.rewind(0, 5)  # 9 and 7 were drafts
    assert (seats.seen(), seats.banned()) == ({7: 1, 8: 0, 9: 1, 5: 1}, set())
    seats.append(0, 7)
    assert (seats.seen(), seats.banned()) == ({7: 2, 8: 0, 9: 1, 5: 1}, {8, 5})
    seats.rewind(0, 2)
    assert (seats.seen(), seats.banned()) == ({7: 0, 8: 0}, set())


def test_a_rewind_by_nothing_and_of_a_slot_without_rules_changes_nothing():
    seats = Seats(2)
    seats.start(0, EVERYTHING, [7, 8], [7])
    seats.start(1, SamplingParams(), [7, 8], [7])
    seats.append(1, 8)
    seats.rewind(0, 3)
    seats.rewind(1, 3)
    assert (seats.seen(0), seats.banned(0)) == ({7: 1, 8: 0}, {8})


@given(
    prompt=st.lists(st.integers(0, 3), max_size=12),
    rounds=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=9), st.integers(0, 9)), max_size=5),
    ignored=st.none() | st.integers(0, 14),
    repetition=st.sampled_from([1, 1.5]),
    size=st.sampled_from([0, 1, 2, 3, 70]),
)
def test_after_every_rewind_as_if_nothing_else_had_come(prompt, rounds, ignored, repetition, size):
    params = SamplingParams(
        presence_penalty=1, repetition_penalty=repetition, prompt_ignore_length=ignored, no_repeat_ngram_size=size
    )
    seats, output = Seats(), []
    seats.start(0, params, prompt)
    counted_from = len(prompt) if ignored is None else ignored
    for tokens, num_rejected in rounds:
        seats.append(0, *tokens)
        output = [*output, *tokens]
        output = output[: max(0, len(output) - num_rejected)]
        seats.rewind(0, len(prompt) + len(output))
        right = counts_of(prompt, output, counted_from)
        assert {i: c for i, c in seats.seen().items() if c} == {i: c for i, c in right.items() if c}
        assert repetition == 1 or seats.seen() == right
        assert size == 0 or seats.banned() == followers(size, prompt + output)


def test_ids_of_padded_columns_may_be_more_than_the_width():
    seats = Seats(width=4)  # the model has 4 tokens and 60 columns more, whose ids a prompt may name
    seats.start(0, EVERYTHING, list(range(60)))
    seats.append(0, 3, 61, 62, 63)
    assert seats.seen() == {**dict.fromkeys(range(60), 0), 3: 1, 61: 1, 62: 1, 63: 1}


@pytest.mark.parametrize("huge", [2**31 - 1, 2**31, 2**70])
def test_numbers_beyond_every_history_are_all_the_same(huge):
    seats = Seats(max_len=4)
    params = SamplingParams(
        no_repeat_ngram_size=huge, min_tokens=huge, max_tokens=huge, prompt_ignore_length=huge, presence_penalty=1
    )
    seats.start(0, params, [5], [5, 5])
    seats.append(0, 5)
    assert (seats.seen(), seats.banned()) == ({5: 3}, set())
    assert seats.rules.patched(np.array([0])).tolist() == [True]
