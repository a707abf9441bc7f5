"""Blocks and the arrays of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from klero.batch import Blocks, History, InputBatch, Scheduled
from klero.batch.input_batch import NO_ROWS
from klero.errors import BlockError


class BlockMachine(RuleBasedStateMachine):
    """Grow and release at random against a dictionary; no block is lost or held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.tokens = Blocks(10, 4, 3, 40), [0, 0, 0]

    @rule(slot=st.integers(0, 2), num_tokens=st.integers(0, 40))
    def grow(self, slot, num_tokens):
        before = self.blocks.held(slot).tolist()
        needed = max(0, -(-num_tokens // 4) - len(before))
        assert self.blocks.missing(slot, num_tokens) == needed
        fits = needed <= self.blocks.num_free
        assert self.blocks.grow(slot, num_tokens) is fits
        after = self.blocks.held(slot).tolist()
        assert after[: len(before)] == before
        assert len(after) == len(before) + (needed if fits else 0)

    @rule(slot=st.integers(0, 2))
    def release(self, slot):
        held = len(self.blocks.held(slot))
        assert self.blocks.release(slot) == held
        assert not self.blocks.tables[slot].any()

    @rule(alive=st.sets(st.integers(0, 2)))
    def keep(self, alive):
        before = [self.blocks.held(slot).tolist() for slot in range(3)]
        self.blocks.keep(alive)
        assert [self.blocks.held(slot).tolist() for slot in range(3)] == [
            before[slot] if slot in alive else [] for slot in range(3)
        ]

    @invariant()
    def every_block_is_somewhere_once(self):
        held = [b for slot in range(3) for b in self.blocks.held(slot).tolist()]
        assert len(set(held)) == len(held)
        assert self.blocks.num_free == 10 - len(held)
        assert all(0 <= b < 10 for b in held)


TestBlockMachine = BlockMachine.TestCase


def test_a_table_has_an_end():
    blocks = Blocks(10, 4, 1, 8)
    with pytest.raises(BlockError, match="more than a block table holds"):
        blocks.grow(0, 9)
    with pytest.raises(BlockError, match="num_blocks=0"):
        Blocks(0, 4, 1, 8)


def test_positions_to_slot_mapping():
    """Block size 16, blocks 5 and 9: positions 0..17 lie at 80..95, 144, 145."""
    history = History(1, 32)
    history.start(0, range(18))
    blocks = Blocks(10, 16, 1, 32)
    blocks.tables[0], blocks.counts[0] = [5, 9], 2
    arrays = InputBatch(1, 32, history, blocks).fill([Scheduled(0, 0, 18, True)])
    assert arrays.slot_mapping.tolist() == [*range(80, 96), 144, 145]


def test_a_small_mixed_step():
    """Slot 2 decodes its 4th token, slot 0 computes two of its three prompt tokens, slot 1 a whole prompt of one."""
    history = History(3, 8)
    for slot, prompt in [(0, [10, 11, 12]), (1, [20]), (2, [30, 31, 32, 33])]:
        history.start(slot, prompt)
    blocks = Blocks(6, 2, 3, 8)
    for slot, num_tokens in [(2, 4), (0, 2), (1, 1)]:
        assert blocks.grow(slot, num_tokens)
    arrays = InputBatch(3, 8, history, blocks).fill(
        [Scheduled(2, 3, 1, True), Scheduled(0, 0, 2, False), Scheduled(1, 0, 1, True)]
    )
    assert arrays.input_ids.tolist() == [33, 10, 11, 20]
    assert arrays.positions.tolist() == [3, 0, 1, 0]
    assert arrays.query_starts.tolist() == [0, 1, 3, 4]
    assert arrays.seq_lens.tolist() == [4, 2, 1]
    assert arrays.slots.tolist() == [2, 0, 1]
    assert arrays.logits_rows.tolist() == [0, 3]
    assert arrays.block_tables.tolist() == [[0, 1], [2, 0], [3, 0]]  # as wide as the longest of this step
    assert arrays.slot_mapping.tolist() == [3, 4, 5, 6]


def test_scored_rows_come_after_the_sampled_ones():
    """Slot 1 scores its whole chunk of two; slot 0 ends and scores from position 1 on; slot 2 only decodes."""
    history = History(3, 8)
    for slot, prompt in [(0, [10, 11, 12, 13]), (1, [20, 21, 22]), (2, [30, 31])]:
        history.start(slot, prompt)
    scheduled = [
        Scheduled(1, 0, 2, False, logits_from=0), Scheduled(2, 1, 1, True), Scheduled(0, 0, 4, True, logits_from=1)
    ]  # fmt: skip
    arrays = InputBatch(3, 8, history, None).fill(scheduled)
    assert arrays.input_ids.tolist() == [20, 21, 31, 10, 11, 12, 13]
    assert arrays.num_sampled == 2
    assert arrays.logits_rows.tolist() == [2, 6, 0, 1, 4, 5]
    assert [list(one.scored) for one in scheduled] == [[0, 1], [], [1, 2]]


def test_a_step_of_nothing():
    arrays = InputBatch(2, 8, History(2, 8), Blocks(6, 2, 2, 8)).fill([])
    assert arrays.input_ids.tolist() == []
    assert arrays.query_starts.tolist() == [0]
    assert arrays.block_tables.shape == (0, 0)


@given(data=st.data())
def test_filled_arrays_equal_a_plain_loop(data):
    """Random steps one after the other on the same arrays: nothing of an earlier step shows."""
    history, blocks = History(4, 24), Blocks(48, data.draw(st.sampled_from([1, 3, 8])), 4, 24)
    for slot in range(4):
        history.start(slot, data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=24)))
        blocks.grow(slot, int(history.lengths[slot]))
    batch = InputBatch(4, 96, history, blocks)
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        scheduled = []
        for slot in chosen:
            length = int(history.lengths[slot])
            computed = data.draw(st.integers(0, length - 1))
            new = data.draw(st.integers(1, length - computed))
            first = data.draw(st.sampled_from([NO_ROWS, 0, length - 1]) | st.integers(0, 24))
            scheduled.append(Scheduled(slot, computed, new, computed + new == length, first))
        arrays = batch.fill(scheduled)
        tokens = [(s.slot, p) for s in scheduled for p in range(s.num_computed, s.num_computed + s.num_new)]
        assert arrays.input_ids.tolist() == [history.ids[slot, p] for slot, p in tokens]
        assert arrays.positions.tolist() == [p for _, p in tokens]
        size = blocks.block_size
        assert arrays.slot_mapping.tolist() == [blocks.tables[s, p // size] * size + p % size for s, p in tokens]
        ends = np.cumsum([s.num_new for s in scheduled])
        assert arrays.query_starts.tolist() == [0, *ends]
        assert arrays.seq_lens.tolist() == [s.num_computed + s.num_new for s in scheduled]
        sampled = [e - 1 for e, s in zip(ends, scheduled, strict=True) if s.samples]
        first_of = {s.slot: s.logits_from for s in scheduled}
        scored = [t for t, (slot, p) in enumerate(tokens) if p >= first_of[slot] and t not in sampled]
        assert arrays.logits_rows.tolist() == sampled + scored
        assert arrays.num_sampled == len(sampled)
        assert [p for s in scheduled for p in s.scored] == [tokens[t][1] for t in scored]
        width = max(len(blocks.held(s.slot)) for s in scheduled)
        assert arrays.block_tables.tolist() == blocks.tables[[s.slot for s in scheduled], :width].tolist()
