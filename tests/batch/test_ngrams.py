"""N-grams as facts, and as a machine against a scan of the history."""

from __future__ import annotations

from functools import cache
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.batch.test_zeros import resident

from klero.batch import History
from klero.batch.ngrams import FIRST_LOG2, Ngrams
from klero.batch.ngrams.reference import followers
from klero.device import HAVE_NUMBA

if not HAVE_NUMBA:
    pytest.skip("needs Numba; the reference reads the history", allow_module_level=True)


class Seats:
    """Histories and their n-grams."""

    def __init__(self, num_slots=1, max_len=64):
        self.history, self.ngrams = History(num_slots, max_len), Ngrams(num_slots, max_len)

    def start(self, index, size, tokens):
        self.history.start(index, tokens)
        self.ngrams.start(index, size, self.history.ids[index], len(tokens))

    def append(self, indices, token_ids):
        self.history.append(np.array(indices, np.int32), np.array(token_ids, np.int32))
        self.ngrams.append(np.array(indices, np.int32), self.history.ids, self.history.lengths)

    def rewind(self, index, length):
        self.ngrams.rewind(index, self.history.ids[index], int(self.history.lengths[index]), length)
        self.history.lengths[index] = length

    def reset(self, index):
        self.history.reset(index)
        self.ngrams.reset(index)

    def followers(self, index=0):
        return self.ngrams.followers(index, self.history.ids[index], int(self.history.lengths[index]))


@pytest.mark.parametrize(
    ("size", "tokens", "right"),
    [
        (3, [5, 6, 7, 5, 6], {7}),  # BN-06
        (3, [5, 6], set()),
        (3, [5], set()),
        (3, [], set()),
        (3, [1, 1, 1], {1}),
        (1, [3, 4], {3, 4}),  # BN-06 too
        (1, [], set()),
        (2, [1, 2, 1, 3, 1], {2, 3}),
        (2, [1, 2, 1, 2, 1], {2}),
        (4, [0, 0, 0, 0, 0], {0}),
        (4, [0, 0, 0], set()),  # the only 3 zeros are the last ones themselves
        (3, [5, 6, 8, 6, 5, 6], {8}),  # 6, 5 is not 5, 6
        (9, [1, 2, 3], set()),
        (64, [7] * 64, {7}),  # as long as the history may be
        (65, [7] * 64, set()),
    ],
)
def test_what_followed(size, tokens, right):
    assert followers(size, tokens) == right
    slots = Seats()
    slots.start(0, size, tokens)
    assert slots.followers() == right
    for begin in range(len(tokens)):
        slots.reset(0)
        slots.start(0, size, tokens[:begin])
        for token_id in tokens[begin:]:
            slots.append([0], [token_id])
        assert slots.followers() == right


def test_slots_of_unlike_sizes_share_nothing():
    slots = Seats(3)
    slots.start(0, 2, [1, 2])
    slots.start(2, 3, [1, 2, 3, 1])
    slots.append([2, 0], [2, 1])
    assert [slots.followers(0), slots.followers(2)] == [{2}, {3}]
    slots.reset(2)
    assert slots.followers(0) == {2}
    slots.start(2, 1, [8])
    assert [slots.followers(0), slots.followers(2)] == [{2}, {8}]


def test_a_rewind_leaves_what_was_there_before():
    slots = Seats()
    slots.start(0, 2, [1, 2, 1])
    before = slots.ngrams.index.copy()
    for token_id in (3, 1, 2, 5, 1):
        slots.append([0], [token_id])
    assert slots.followers() == {2, 3}
    slots.rewind(0, 3)
    assert slots.followers() == {2}
    assert (slots.ngrams.index == before).all()
    slots.append([0], [4])
    slots.append([0], [1])
    assert slots.followers() == {2, 4}  # no trace of 3


@pytest.mark.parametrize("size", [1, 2, 3, 17, 150])
@pytest.mark.parametrize(
    "tokens",
    [[3] * 200, list(range(200)), [0, 128255] * 100, [1, 2, 3, 4, 5, 6, 7] * 29, [*range(100), *range(100)]],
    ids=["all equal", "all different", "two", "a cycle", "twice"],
)
def test_adversarial_histories_forward_and_back(size, tokens):
    slots = Seats(max_len=256)
    slots.start(0, size, tokens[:5])
    for length in range(6, len(tokens) + 1):
        slots.append([0], [tokens[length - 1]])
        assert slots.followers() == followers(size, tokens[:length])
    for length in range(len(tokens), 5, -9):
        assert slots.followers() == followers(size, tokens[:length])
        slots.rewind(0, max(5, length - 9))
    assert slots.followers() == followers(size, tokens[:5])


def test_the_index_grows_with_the_tokens_and_is_reset_with_them():
    slots = Seats(max_len=3000)
    slots.start(0, 3, [])
    for n in range(3000):
        slots.append([0], [n])
        used, filled = 1 << int(slots.ngrams.log2_used[0]), int(slots.ngrams.num_used[0])
        assert filled == max(0, n - 1)
        assert 2 * filled <= used <= max(1 << FIRST_LOG2, 4 * filled)
    assert np.count_nonzero(slots.ngrams.index) == 2998
    slots.reset(0)
    assert (slots.ngrams.num_used[0], slots.ngrams.log2_used[0]) == (0, FIRST_LOG2)


def layout(slots, index=0):
    """What of a slot is valid: the part of the index that is in use, how much of it is filled, and the chains."""
    ngrams, size, length = slots.ngrams, int(slots.ngrams.sizes[index]), int(slots.history.lengths[index])
    used = ngrams.index[index, : 1 << int(ngrams.log2_used[index])]
    return used.tolist(), int(ngrams.num_used[index]), ngrams.previous[index, max(0, size - 1) : length].tolist()


@pytest.mark.parametrize("again", ["reset", "start"])
def test_a_slot_that_is_seated_again_is_as_new(again):
    old, new = Seats(max_len=200), Seats(max_len=200)
    old.start(0, 2, list(range(100)) * 2)
    old.rewind(0, 150)
    if again == "reset":
        old.reset(0)
    for slots in (old, new):
        slots.start(0, 3, [1, 2, 3, 1])
        slots.append([0], [2])
    assert layout(old) == layout(new)
    assert old.followers() == {3}


def poisoned(slots, value=-7):
    """Seats whose memory, where nothing is valid yet, holds what no search may come across."""
    slots.ngrams.start(0, 1, slots.history.ids[0], 0)  # makes the arrays
    for array in (slots.ngrams.index, slots.ngrams.previous, slots.history.ids):
        array[...] = value
    for index in range(len(slots.history.lengths)):
        slots.reset(index)
    return slots


@pytest.mark.parametrize("size", [1, 2, 3, 30])
@pytest.mark.parametrize("value", [-7, 1, 3, 2**31 - 1])
def test_nothing_reads_what_is_not_valid(value, size):
    slots, clean = poisoned(Seats(2, 300), value), Seats(2, 300)
    tokens = np.random.default_rng(size).integers(0, 12, 250).tolist()
    for each in (slots, clean):
        each.start(1, size, tokens[:100])
        for token_id in tokens[100:]:
            each.append([1], [token_id])
        each.rewind(1, 120)
        for token_id in tokens[120:130]:
            each.append([1], [token_id])
    assert layout(slots, 1) == layout(clean, 1)
    assert slots.followers(1) == followers(size, tokens[:130])


@cache
def tokens_of_one_place(num):
    """Tokens that, alone before a position, begin their search at one place, in an index of up to 2**10 places."""
    return list(islice((t for t in count() if hash_of([t]) >> 22 == 5), num))


def hash_of(tokens):
    """FNV-1a by words, then a mix, in Python's integers."""
    h = 2166136261
    for t in tokens:
        h = (h ^ t) * 16777619 % 2**32
    return (h ^ h >> 15) * 0x9E3779B9 % 2**32


def index_of(size, tokens, num_places):
    """Linear probing as a textbook has it: the n - 1 tokens before each position in their first empty or own place."""
    index, keys = [0] * num_places, [None] * num_places
    for p in range(size - 1, len(tokens)):
        key = tokens[p - size + 1 : p]
        place = hash_of(key) * num_places >> 32
        while keys[place] not in (None, key):
            place = (place + 1) % num_places
        index[place], keys[place] = p + 1, key
    return index


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("one_place", [False, True])
@pytest.mark.parametrize("num_before", [0, 7, 8, 9, 10, 17, 18])
@pytest.mark.parametrize("num_after", [1, 2, 9, 40])
def test_a_growth_right_before_a_rewind_breaks_no_search(num_before, num_after, one_place, size):
    """The index as it is in use after a rewind is what the positions alone, added in their order, would make of it: so
    no search crosses a place that was emptied."""
    tokens = tokens_of_one_place(60) if one_place else list(range(60))
    before, after = tokens[:num_before], tokens[num_before : num_before + num_after]
    slots = Seats()
    slots.start(0, size, before)
    for token_id in after:
        slots.append([0], [token_id])
    slots.rewind(0, num_before)
    used, filled, _ = layout(slots)
    assert used == index_of(size, before, len(used))
    assert filled == np.count_nonzero(used)
    for n, token_id in enumerate(before[:20], 1):
        slots.append([0], [token_id])
        assert slots.followers() == followers(size, before + before[:n])


def test_memory_follows_the_tokens_not_the_longest_history():
    """256 slots of 1,000 tokens. Prints what it took: `pytest -s`."""
    tokens = np.random.default_rng(0).integers(0, 128256, (256, 1000)).astype(np.int32)
    before, ngrams = resident(), Ngrams(256, 131072)
    for index in range(256):
        ngrams.start(index, 3, tokens[index], 1000)
    taken = resident() - before
    print(f"256 slots x 1,000 tokens: {taken / 1e6:.1f} MB")
    assert taken < 10e6  # 3 MB: 4 bytes a token and 8 of index; whole pages


SIZES = st.sampled_from([1, 2, 3, 4, 9, 70])
TOKENS = st.lists(st.integers(0, 2) | st.integers(0, 30), max_size=50)


class NgramsMachine(RuleBasedStateMachine):
    """Start, append, rewind and reset three slots at random; each says what a scan of its history says."""

    @initialize()
    def make(self):
        self.slots, self.seats = poisoned(Seats(3, 60)), {}

    @precondition(lambda self: len(self.seats) < 3)
    @rule(size=SIZES, tokens=TOKENS)
    def start(self, size, tokens):
        index = min({0, 1, 2} - set(self.seats))
        self.slots.start(index, size, tokens)
        self.seats[index] = size, list(tokens)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def append(self, data):
        free = [s for s, (_, tokens) in self.seats.items() if len(tokens) < 60]
        indices = data.draw(st.permutations(free))
        token_ids = data.draw(st.lists(st.integers(0, 3), min_size=len(indices), max_size=len(indices)))
        self.slots.append(indices, token_ids)
        for index, token_id in zip(indices, token_ids, strict=True):
            self.seats[index][1].append(token_id)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def rewind(self, data):
        index = data.draw(st.sampled_from(sorted(self.seats)))
        tokens = self.seats[index][1]
        length = data.draw(st.integers(0, len(tokens)))
        self.slots.rewind(index, length)
        del tokens[length:]

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def reset(self, data):
        index = data.draw(st.sampled_from(sorted(self.seats)))
        self.slots.reset(index)
        del self.seats[index]

    @invariant()
    def each_slot_remembers_its_own_history(self):
        for index, (size, tokens) in self.seats.items():
            assert self.slots.followers(index) == followers(size, tokens)
            grams = {tuple(tokens[p - size + 1 : p]) for p in range(size - 1, len(tokens))}
            used, filled, _ = layout(self.slots, index)
            assert np.count_nonzero(used) == filled == len(grams)


TestNgramsMachine = NgramsMachine.TestCase
TestNgramsMachine.settings = settings(stateful_step_count=30)
