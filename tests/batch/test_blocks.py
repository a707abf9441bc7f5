"""One pool of blocks: free, held, shared, cached."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from klero.batch.blocks import Blocks
from klero.errors import BlockError


def cached(*keys, num_blocks=4):
    """A pool whose blocks 0, 1, ... were registered under these keys by one sequence that has left."""
    blocks = Blocks(num_blocks, 16)
    ids = blocks.allocate(len(keys))
    for block, key in zip(ids, keys, strict=True):
        blocks.register(block, key)
    blocks.release(ids)
    return blocks


def test_blocks_come_in_order_and_come_back():
    blocks = Blocks(4, 16)
    assert blocks.allocate(0) == []
    assert blocks.allocate(2) == [0, 1]
    assert blocks.num_free == 2
    blocks.release([0, 1])
    assert blocks.allocate(3) == [0, 1, 2]


def test_out_of_blocks():
    blocks = Blocks(4, 16)
    blocks.allocate(3)
    with pytest.raises(BlockError, match="2 blocks wanted: 1 of 4 are free"):
        blocks.allocate(2)
    assert blocks.allocate(1) == [3]  # nothing was taken by the one that failed


@pytest.mark.parametrize("size", [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_has_blocks(size):
    with pytest.raises(BlockError, match="must be >= 1"):
        Blocks(*size)
    with pytest.raises(BlockError, match="-1 blocks wanted"):
        Blocks(4, 16).allocate(-1)


def test_a_shared_block_is_free_when_its_last_owner_leaves():
    blocks = Blocks(4, 16)
    ids = blocks.allocate(2)
    blocks.share(ids)
    blocks.release(ids)
    assert (blocks.num_owners(0), blocks.num_free) == (1, 2)
    blocks.release(ids)
    assert (blocks.num_owners(0), blocks.num_free) == (0, 4)


@pytest.mark.parametrize("ids", [[0, 1], [0, 0], [4], [-1], [0, 3]])
def test_a_block_that_is_not_out_cannot_come_back(ids):
    """0 is out once. The others are not, or are not blocks; -1 would be the last one of a list."""
    blocks = Blocks(4, 16)
    blocks.allocate(1)
    with pytest.raises(BlockError, match="comes back"):
        blocks.release(ids)
    assert (blocks.num_owners(0), blocks.num_free) == (1, 3)  # 0 was not taken before 1 was looked at


@pytest.mark.parametrize("ids", [[0, 1], [4], [-1]])
def test_a_block_that_holds_nothing_cannot_be_shared(ids):
    blocks = Blocks(4, 16)
    blocks.allocate(1)
    with pytest.raises(BlockError, match="neither held nor cached"):
        blocks.share(ids)
    assert blocks.num_owners(0) == 1


def test_the_hit_rate_is_that_of_the_look_ups_that_were_used():
    blocks = cached(b"a", b"b", b"c")
    assert (blocks.find([b"a", b"x"]), blocks.hit_rate) == ([0], 0)
    blocks.count_lookup(4, 2)
    blocks.count_lookup(2, 0)
    assert (blocks.num_queries, blocks.num_hits, blocks.hit_rate) == (6, 2, 1 / 3)


def test_the_longest_cached_prefix_is_found():
    blocks = cached(b"a", b"b", b"c")
    assert blocks.find([b"a", b"b", b"x", b"c"]) == [0, 1]
    assert blocks.find([b"x", b"a"]) == []
    assert blocks.find([]) == []
    assert (blocks.num_free, blocks.num_cached) == (4, 3)  # looking takes nothing


def test_blank_blocks_go_before_cached_ones():
    blocks = cached(b"a", b"b")
    assert blocks.allocate(2) == [2, 3]
    assert (blocks.num_cached, blocks.num_evictions) == (2, 0)
    assert blocks.allocate(1) == [1]
    assert (blocks.num_cached, blocks.num_evictions) == (1, 1)


def test_a_tail_is_evicted_before_its_head():
    blocks = cached(b"a", b"b", b"c", num_blocks=3)
    assert blocks.allocate(2) == [2, 1]
    assert blocks.find([b"a", b"b", b"c"]) == [0]


def test_the_least_recently_used_is_evicted_first():
    """a, b, c were used in this order by three sequences; then a is used again."""
    blocks = Blocks(3, 16)
    for key in (b"a", b"b", b"c"):
        (block,) = blocks.allocate(1)
        blocks.register(block, key)
        blocks.release([block])
    blocks.share(blocks.find([b"a"]))
    blocks.release([0])
    assert blocks.allocate(3) == [1, 2, 0]


def test_a_cached_block_wakes_up():
    blocks = cached(b"a", num_blocks=2)
    blocks.share([0, 0])  # two sequences at once
    assert (blocks.num_owners(0), blocks.num_free) == (2, 1)
    assert blocks.allocate(1) == [1]
    with pytest.raises(BlockError):
        blocks.allocate(1)  # held, it cannot be evicted
    blocks.release([0, 0])
    assert blocks.find([b"a"]) == [0]


def test_two_blocks_of_the_same_content():
    """The second is not registered, and so blank when it is free."""
    blocks = Blocks(4, 16)
    blocks.allocate(2)
    for block in (0, 1, 0):
        blocks.register(block, b"a")
    assert [blocks.is_registered(block) for block in (0, 1)] == [True, False]
    blocks.release([0, 1])
    assert blocks.allocate(3) == [1, 2, 3]
    assert blocks.find([b"a"]) == [0]


def test_what_cannot_be_registered():
    blocks = cached(b"a")
    with pytest.raises(BlockError, match="not out"):
        blocks.register(1, b"b")
    with pytest.raises(BlockError, match="not out"):
        blocks.register(-1, b"b")
    blocks.share([0])
    with pytest.raises(BlockError, match="another key"):
        blocks.register(0, b"b")
    assert blocks.find([b"a"]) == [0]


def test_an_unregistered_block_is_found_no_more():
    blocks = cached(b"a", b"b")
    blocks.share([0])
    for block in (0, 1, 2):
        blocks.unregister(block)
    assert (blocks.num_cached, blocks.num_free, blocks.num_owners(0)) == (0, 3, 1)
    blocks.register(0, b"c")
    assert blocks.find([b"c"]) == [0]
    assert sorted(blocks.allocate(3)) == [1, 2, 3]
    assert blocks.num_evictions == 0


def test_forget_drops_contents_and_leaves_owners():
    blocks = cached(b"a", b"b")
    blocks.share([0])
    blocks.forget()
    assert (blocks.num_cached, blocks.num_free, blocks.num_owners(0)) == (0, 3, 1)
    blocks.release([0])
    assert blocks.find([b"a"]) == []
    assert sorted(blocks.allocate(4)) == [0, 1, 2, 3]
    assert blocks.num_evictions == 0


BLOCK = st.integers(0, 5)


class PoolMachine(RuleBasedStateMachine):
    """Everything at random, beside dictionaries and lists that are searched."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks):
        self.blocks, self.num_blocks = Blocks(num_blocks, 4), num_blocks
        self.owners, self.key_of = dict.fromkeys(range(num_blocks), 0), {}
        self.used = []  # blocks with content that nobody holds, least recently used first

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        free = [block for block, owners in self.owners.items() if owners == 0]
        if count > len(free):
            with pytest.raises(BlockError):
                self.blocks.allocate(count)
            return
        blank = set(free) - set(self.used)
        taken = self.blocks.allocate(count)
        assert len(set(taken)) == count
        num_blank = min(count, len(blank))
        assert set(taken[:num_blank]) <= blank
        assert taken[num_blank:] == self.used[: count - num_blank]
        for block in taken:
            self.owners[block] = 1
            self.key_of.pop(block, None)
        self.used = self.used[count - num_blank :]

    @rule(ids=st.lists(BLOCK, max_size=4))
    def share(self, ids):
        if not all(self.owners.get(block) or block in self.key_of for block in ids):
            with pytest.raises(BlockError):
                self.blocks.share(ids)
            return
        self.blocks.share(ids)
        for block in ids:
            self.owners[block] += 1
            self.used = [other for other in self.used if other != block]

    @rule(ids=st.lists(BLOCK, max_size=4))
    def release(self, ids):
        if any(self.owners.get(block, 0) < times for block, times in Counter(ids).items()):
            with pytest.raises(BlockError):
                self.blocks.release(ids)
            return
        self.blocks.release(ids)
        for block in reversed(ids):
            self.owners[block] -= 1
            if self.owners[block] == 0 and block in self.key_of:
                self.used.append(block)

    @rule(block=BLOCK, key=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, block, key):
        if not self.owners.get(block) or self.key_of.get(block, key) != key:
            with pytest.raises(BlockError):
                self.blocks.register(block, key)
            return
        self.blocks.register(block, key)
        if key not in self.key_of.values():
            self.key_of[block] = key

    @rule(block=BLOCK)
    def unregister(self, block):
        if block < self.num_blocks:
            self.blocks.unregister(block)
            self.key_of.pop(block, None)
            self.used = [other for other in self.used if other != block]

    @rule()
    def forget(self):
        self.blocks.forget()
        self.key_of, self.used = {}, []

    @invariant()
    def all_is_as_in_the_dictionaries(self):
        assert [self.blocks.num_owners(block) for block in range(self.num_blocks)] == list(self.owners.values())
        assert self.blocks.num_free == list(self.owners.values()).count(0)
        assert self.blocks.num_cached == len(self.key_of)
        for block in range(self.num_blocks):
            assert self.blocks.is_registered(block) == (block in self.key_of)
        for block, key in self.key_of.items():
            assert self.blocks.find([key]) == [block]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100)
