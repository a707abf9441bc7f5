"""Slots, columns and history as facts, and as machines against a naive model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from klero.batch import Column, Columns, History, Slot, Slots
from klero.errors import RequestError, SlotError


def test_a_slot_opens_for_its_owner_alone():
    slots = Slots(2)
    a = slots.take("a")
    slots.release(a)
    b = slots.take("b")
    assert b.index == a.index
    assert slots.check(b) == b.index
    with pytest.raises(SlotError, match="belongs to 'b' now"):
        slots.check(a)
    with pytest.raises(SlotError, match="belongs to 'b' now"):
        slots.release(a)
    slots.release(b)
    with pytest.raises(SlotError, match="is free"):
        slots.check(b)
    with pytest.raises(SlotError, match="there are 2 slots"):
        slots.check(Slot(2, 0))


def test_several_slots_are_looked_up_at_once():
    slots = Slots(3)
    a, b, c = (slots.take(name) for name in "abc")
    owned = slots.owned([c, a])
    assert (owned.slots, owned.indices.tolist(), owned.distinct) == ((c, a), [2, 0], True)
    assert slots.owned((c, a)) is owned is slots.owned([Slot(2, 0), a])
    assert not slots.owned([a, b, a]).distinct
    assert slots.owned([]).indices.tolist() == []
    slots.owned((a, b))
    slots.release(b)
    with pytest.raises(SlotError, match="is free"):
        slots.owned((a, b))
    now = slots.take("now")
    with pytest.raises(SlotError, match="belongs to 'now'"):
        slots.owned((a, b))
    assert slots.owned((a, now)).indices.tolist() == [0, 1]
    slots.keep([a])
    with pytest.raises(SlotError, match="is free"):
        slots.owned((a, now))
    for wrong in (Slot(3, 0), Slot(-1, 0)):
        with pytest.raises(SlotError, match="there are 3 slots"):
            slots.owned((a, wrong))


def test_all_seats_taken():
    slots = Slots(1)
    slots.take("a")
    with pytest.raises(SlotError, match="no slot free for 'b'"):
        slots.take("b")
    with pytest.raises(ValueError, match="num_slots"):
        Slots(0)


def test_a_column_goes_back_to_neutral_on_reset():
    columns = Columns(3, {"seed": Column(np.uint64, 0), "scale": Column(np.float32, 1.0)})
    columns.write(1, seed=2**64 - 1, scale=0.5)
    assert columns["seed"].tolist() == [0, 2**64 - 1, 0]
    assert columns["scale"].tolist() == [1.0, 0.5, 1.0]
    columns.reset(1)
    assert columns["seed"].tolist() == [0, 0, 0]
    assert columns["scale"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(KeyError):
        columns.write(0, unknown=1)


def test_a_column_may_hold_more_than_a_number():
    columns = Columns(2, {"table": Column(np.int32, 0, (3,)), "pair": Column(np.int8, -1, (2,))})
    assert columns["table"].shape == (2, 3)
    columns.write(1, table=[4, 5, 6], pair=[1, 2])
    assert columns["table"].tolist() == [[0, 0, 0], [4, 5, 6]]
    assert columns["pair"].tolist() == [[-1, -1], [1, 2]]
    columns.reset(1)
    assert columns["table"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert columns["pair"].tolist() == [[-1, -1], [-1, -1]]


def test_history_appends_rewinds_and_resets():
    history = History(2, 4)
    history.start(0, [7, 8])
    history.append(np.array([0]), np.array([9]))
    assert history.tokens(0).tolist() == [7, 8, 9]
    history.rewind(0, 2)
    assert history.tokens(0).tolist() == [7, 8]
    with pytest.raises(SlotError, match=r"\[2, 2\]"):
        history.rewind(0, 1)
    history.append(np.array([0]), np.array([1]))
    history.append(np.array([0]), np.array([2]))
    with pytest.raises(SlotError, match="max_len=4"):
        history.append(np.array([0]), np.array([3]))
    with pytest.raises(RequestError, match="5 tokens"):
        history.start(1, [0] * 5)
    history.reset(0)
    assert history.tokens(0).tolist() == []


class SlotMachine(RuleBasedStateMachine):
    """Take and release at random; at every moment each seat has at most one owner, and only that one opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.seated, self.gone = Slots(4), {}, []

    @rule(name=st.text(min_size=1, max_size=3))
    def take(self, name):
        if len(self.seated) == 4:
            with pytest.raises(SlotError):
                self.slots.take(name)
        else:
            slot = self.slots.take(name)
            assert slot not in self.gone
            self.seated[slot] = name

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.seated)))
        del self.seated[slot]
        self.slots.release(slot)
        self.gone.append(slot)

    @rule(data=st.data())
    def keep(self, data):
        alive = data.draw(st.sets(st.sampled_from(sorted(self.seated)))) if self.seated else set()
        self.slots.keep(alive)
        self.gone += [slot for slot in self.seated if slot not in alive]
        self.seated = {slot: name for slot, name in self.seated.items() if slot in alive}

    @invariant()
    def each_seat_has_one_owner(self):
        assert self.slots.num_free == 4 - len(self.seated)
        assert len({slot.index for slot in self.seated}) == len(self.seated)
        for slot in self.seated:
            assert self.slots.check(slot) == slot.index
        for slot in self.gone:
            with pytest.raises(SlotError):
                self.slots.check(slot)


TestSlotMachine = SlotMachine.TestCase
