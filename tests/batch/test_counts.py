"""Counts as facts, and as a machine against collections.Counter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.batch.test_zeros import resident

from klero.batch.counts import FIRST_LOG2, Counts
from klero.batch.counts.reference import counts_of
from klero.device import HAVE_NUMBA
from klero.errors import SlotError

if not HAVE_NUMBA:
    pytest.skip("needs Numba; the reference reads the history", allow_module_level=True)

NONE = 10**6  # counted_from: no prompt token counts
V = 128256


def started(prompt=(), output=(), counted_from=NONE, *, max_len=64):
    """Counts of one slot with a history."""
    counts = Counts(1, max_len)
    counts.start(0, prompt, output, counted_from)
    return counts


def append(counts, index, *token_ids):
    for token_id in token_ids:
        counts.append(np.array([index]), np.array([token_id]))


@pytest.mark.parametrize(
    ("prompt", "output", "counted_from", "right"),
    [
        ([0], [0, 0, 1], NONE, {0: 2, 1: 1}),  # PN-01: once in the prompt, twice in the output
        ([0], [0, 0, 1], 0, {0: 3, 1: 1}),
        ([7, 7, 9], [], 0, {7: 2, 9: 1}),
        ([7, 7, 9], [], 1, {7: 1, 9: 1}),
        ([7, 7, 9], [], 2, {7: 0, 9: 1}),
        ([7, 7, 9], [], 3, {7: 0, 9: 0}),
        ([7, 7, 9], [], NONE, {7: 0, 9: 0}),
        ([], [4], NONE, {4: 1}),  # PN-03: two rows of unlike lengths, nothing between them
        ([], [1, 1, 2, 3, 5], NONE, {1: 2, 2: 1, 3: 1, 5: 1}),
        ([V - 1, 0], [0, V - 1, V - 1], NONE, {V - 1: 2, 0: 1}),
        ([], [], NONE, {}),
    ],
)
def test_what_occurred_and_how_often(prompt, output, counted_from, right):
    assert counts_of(prompt, output, counted_from) == right
    assert started(prompt, output, counted_from).of(0) == right
    counts = started(prompt, (), counted_from)
    append(counts, 0, *output)
    assert counts.of(0) == right


def test_entries_come_in_the_order_of_first_occurrence():
    counts = started([9, 7, 9], [3, 7, 1, 3])
    assert list(counts.of(0)) == [9, 7, 3, 1]
    assert counts.ids[0, :4].tolist() == [9, 7, 3, 1]
    assert counts.counts[0, :4].tolist() == [0, 1, 2, 1]


def test_rows_of_unlike_lengths_share_nothing():
    counts = Counts(3, 8)
    counts.start(0, [], [4], NONE)
    counts.start(2, [], [1, 1, 2, 3], NONE)
    counts.append(np.array([2, 0]), np.array([5, 4]))
    assert [counts.of(s) for s in range(3)] == [{4: 2}, {}, {1: 2, 2: 1, 3: 1, 5: 1}]
    counts.reset(2)
    assert [counts.of(s) for s in range(3)] == [{4: 2}, {}, {}]


def test_a_rewind_leaves_what_was_there_before():
    counts = started([5, 6], [6])
    before = counts.of(0), counts.index.copy()
    append(counts, 0, 6, 8, 9, 8)
    counts.rewind(0, [6, 8, 9, 8])
    assert counts.of(0) == before[0] == {5: 0, 6: 1}
    assert (counts.index == before[1]).all()
    counts.rewind(0, [])
    assert counts.of(0) == before[0]
    counts.rewind(0, [6])
    assert counts.of(0) == {5: 0, 6: 0}  # the prompt's entries stay, for the repetition penalty


def test_a_rewind_of_what_never_came_is_refused():
    counts = started([5], [6])
    with pytest.raises(SlotError, match="slot 0: token 7 does not count"):
        counts.rewind(0, [7])
    with pytest.raises(SlotError, match="token 5 does not count"):
        counts.rewind(0, [5])
    assert counts.of(0) == {5: 0, 6: 1}


def ids_of_one_place(num):
    """Ids whose search begins at the same place, however large the index: the multiplicative hash, inverted."""
    inverse = pow(0x9E3779B9, -1, 2**32)
    return [(k * inverse) % 2**31 for k in range(1, 4 * num) if (k * inverse) % 2**32 < 2**31][:num]


@pytest.mark.parametrize(
    "output",
    [
        list(range(200)),
        [3] * 200,
        [V - 1, 0] * 100,
        ids_of_one_place(100) * 2,
        ids_of_one_place(100)[::-1] + list(range(100)),
        list(range(V - 200, V)),
    ],
    ids=["all different", "all equal", "first and last", "one chain", "one chain, then others", "the last ones"],
)
def test_adversarial_ids_forward_and_back(output):
    counts = started(output[:10], max_len=300)
    for n, token_id in enumerate(output):
        append(counts, 0, token_id)
        assert counts.of(0)[token_id] == output[: n + 1].count(token_id)
    assert counts.of(0) == counts_of(output[:10], output, NONE)
    for n in range(len(output), 0, -7):
        assert counts.of(0) == counts_of(output[:10], output[:n], NONE)
        counts.rewind(0, output[max(0, n - 7) : n])
    assert counts.of(0) == dict.fromkeys(output[:10], 0)


def test_the_index_grows_with_the_tokens_and_is_reset_with_them():
    counts = started(max_len=5000)
    for n in range(1, 5001):
        append(counts, 0, n)
        assert 2 * n <= 1 << int(counts.log2_used[0]) <= max(1 << FIRST_LOG2, 4 * n)
        assert not n % 100 or np.count_nonzero(counts.index) == n
    counts.reset(0)
    assert (counts.of(0), counts.log2_used[0]) == ({}, FIRST_LOG2)


def layout(counts, index=0):
    """What of a slot is valid: its entries, and the part of the index that is in use."""
    n = int(counts.num_entries[index])
    used = counts.index[index, : 1 << int(counts.log2_used[index])]
    return counts.ids[index, :n].tolist(), counts.counts[index, :n].tolist(), used.tolist()


def test_a_reset_slot_is_as_new():
    old = started(range(100), [5, 6, 5] * 9, 0, max_len=200)
    old.rewind(0, [6, 5])
    old.reset(0)
    assert layout(old) == layout(started(max_len=200))
    old.start(0, [8], [9, 8], NONE)
    assert layout(old) == layout(started([8], [9, 8], max_len=200))


def test_starting_again_forgets_what_the_slot_held():
    counts = started(range(100), [5, 6], 0, max_len=200)
    counts.start(0, [8], [9, 8], NONE)
    assert layout(counts) == layout(started([8], [9, 8], max_len=200))


def poisoned(counts, value=-7):
    """Counts whose memory, where nothing is valid yet, holds what no search may come across."""
    counts.start(0, [], [], 0)  # makes the arrays
    for array in (counts.ids, counts.counts, counts.index):
        array[...] = value
    for index in range(len(counts.num_entries)):
        counts.reset(index)
    return counts


@pytest.mark.parametrize("value", [-7, 1, 3, 2**31 - 1])
def test_nothing_reads_what_is_not_valid(value):
    counts, clean = poisoned(Counts(2, 300), value), Counts(2, 300)
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 60, 40), rng.integers(0, 90, 200)
    for each in (counts, clean):
        each.start(1, prompt, output[:9], 20)
        append(each, 1, *output[9:])
        each.rewind(1, output[100:])
        append(each, 1, *output[100:120])
    assert layout(counts, 1) == layout(clean, 1)
    assert counts.of(1) == counts_of(prompt.tolist(), output[:120].tolist(), 20)


@pytest.mark.parametrize("one_place", [False, True])
@pytest.mark.parametrize("num_before", [0, 6, 7, 8, 15, 16, 17])
@pytest.mark.parametrize("num_after", [1, 2, 9, 40])
def test_a_growth_right_before_a_rewind_breaks_no_search(num_before, num_after, one_place):
    """The index as it is in use after a rewind is what the entries alone, put there in their order, would make of it:
    so no search crosses a place that was emptied."""
    tokens = ids_of_one_place(60) if one_place else list(range(60))
    before, after = tokens[:num_before], tokens[num_before : num_before + num_after]
    counts = started(before[:3], before[3:])
    append(counts, 0, *after)
    counts.rewind(0, after)
    ids, _, used = layout(counts)
    assert ids == before
    assert used == index_of(before, len(used))
    append(counts, 0, *after[::-1], *before)
    assert counts.of(0) == counts_of(before[:3], [*before[3:], *after[::-1], *before], NONE)


def index_of(ids, num_places):
    """Linear probing as a textbook has it: entry + 1 in the first empty place from the top bits of id * 0x9E3779B9."""
    index = [0] * num_places
    for entry, token_id in enumerate(ids):
        place = (token_id * 0x9E3779B9) % 2**32 * num_places >> 32
        while index[place]:
            place = (place + 1) % num_places
        index[place] = entry + 1
    return index


def test_as_many_ids_as_tokens_fit_whatever_the_vocabulary():
    ids = [-1, -(2**31), 2**31 - 1, *range(61)]
    counts = started(ids[:32], ids[32:])
    assert counts.of(0) == counts_of(ids[:32], ids[32:], NONE)
    assert len(counts.of(0)) == 64
    counts.rewind(0, ids[32:])
    assert counts.of(0) == dict.fromkeys(ids[:32], 0)


def test_memory_follows_the_tokens_not_the_vocabulary_and_not_the_longest_history():
    """256 slots of 1,000 distinct tokens; a dense table takes 131 MB. Prints what it took: `pytest -s`."""
    tokens = np.random.default_rng(0).permuted(np.tile(np.arange(V, dtype=np.int32), (256, 1)), axis=1)[:, :1000].copy()
    before, counts = resident(), Counts(256, 131072)
    for index in range(256):
        counts.start(index, tokens[index, :900], (), 0)
    for k in range(900, 1000):
        counts.append(np.arange(256), tokens[:, k])
    taken = resident() - before
    print(f"256 slots x 1,000 tokens: {taken / 1e6:.1f} MB, a dense table {256 * V * 4 / 1e6:.1f} MB")
    assert counts.num_entries.tolist() == [1000] * 256
    assert taken < 10e6  # 4 MB: 4 + 4 bytes an entry and 8 of index; whole pages


TOKENS = st.lists(st.integers(0, 8) | st.integers(0, 40), max_size=30)


class CountsMachine(RuleBasedStateMachine):
    """Start, append, rewind and reset three slots at random; each says what a Counter of its history says."""

    @initialize()
    def make(self):
        self.counts, self.seats = poisoned(Counts(3, 60)), {}

    @precondition(lambda self: len(self.seats) < 3)
    @rule(prompt=TOKENS, output=TOKENS, counted_from=st.sampled_from([0, 1, 5, NONE]))
    def start(self, prompt, output, counted_from):
        index = min({0, 1, 2} - set(self.seats))
        self.counts.start(index, prompt, output, counted_from)
        self.seats[index] = prompt, list(output), counted_from

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def append(self, data):
        free = [s for s, (prompt, output, _) in self.seats.items() if len(prompt) + len(output) < 60]
        indices = data.draw(st.permutations(free))
        token_ids = data.draw(st.lists(st.integers(0, 40), min_size=len(indices), max_size=len(indices)))
        self.counts.append(np.array(indices, np.int32), np.array(token_ids, np.int32))
        for index, token_id in zip(indices, token_ids, strict=True):
            self.seats[index][1].append(token_id)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def rewind(self, data):
        index = data.draw(st.sampled_from(sorted(self.seats)))
        output = self.seats[index][1]
        length = data.draw(st.integers(0, len(output)))
        self.counts.rewind(index, output[length:])
        del output[length:]

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def reset(self, data):
        index = data.draw(st.sampled_from(sorted(self.seats)))
        self.counts.reset(index)
        del self.seats[index]

    @invariant()
    def each_slot_counts_its_own_history(self):
        for index in range(3):
            right = counts_of(*self.seats.get(index, ([], [], 0)))
            assert list(self.counts.of(index).items()) == list(right.items())
            used = self.counts.index[index, : 1 << int(self.counts.log2_used[index])]
            assert sorted(used[used != 0].tolist()) == list(range(1, len(right) + 1))


TestCountsMachine = CountsMachine.TestCase
TestCountsMachine.settings = settings(stateful_step_count=30)
