"""Slots: the seats of sequences. A `Slot` is a seat and the proof of owning it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from klero.errors import OptionError, SlotError


@dataclass(frozen=True, order=True)
class Slot:
    """A seat (0 .. num_slots - 1) and the turn in which it was taken; a stale turn no longer opens it."""

    index: int
    turn: int


class Owned(NamedTuple):
    """Slots in the hands of their owners. indices: int32 [N], to be read only. distinct: none is there twice."""

    slots: tuple[Slot, ...]
    indices: npt.NDArray[np.int32]
    distinct: bool


class Slots:
    """The seats of a batch: taken and released in O(1), never moved."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise OptionError(f"num_slots={num_slots}: must be >= 1")
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._turn = [0] * num_slots
        self._owner: list[str | None] = [None] * num_slots
        self._last: Owned | None = None  # until somebody leaves

    @property
    def num_free(self) -> int:
        """Seats that nobody sits in."""
        return len(self._free)

    def take(self, owner: str) -> Slot:
        """Seat a sequence. owner: a name for messages. Raises SlotError when all seats are taken."""
        if not self._free:
            raise SlotError(f"no slot free for {owner!r}: all {self.num_slots} are taken; raise max_num_seqs or wait")
        index = self._free[-1]
        self._owner[index] = owner
        self._free.pop()
        return Slot(index, self._turn[index])

    def release(self, slot: Slot) -> None:
        """Free a seat; its turn ends, so every older `Slot` of this seat is refused from now on."""
        self.check(slot)
        self._last = None
        self._turn[slot.index] += 1
        self._owner[slot.index] = None
        self._free.append(slot.index)

    def keep(self, alive: Iterable[Slot]) -> list[int]:
        """Free every seat but these, whatever was cut short before; return the free ones."""
        self._last = None
        kept = {slot.index for slot in alive}
        gone = [index for index in range(self.num_slots) if index not in kept]
        for index in gone:
            self._turn[index] += self._owner[index] is not None
            self._owner[index] = None
        self._free = gone[::-1]
        return gone

    def owned(self, slots: Iterable[Slot]) -> Owned:
        """Look up several at once; SlotError for the first that is not its owner's any more.

        Those that were looked up last are not looked at again, unless somebody left since.
        """
        slots = tuple(slots)
        if self._last is None or self._last.slots != slots:  # quick where they are the same objects
            indices = np.array([self.check(slot) for slot in slots], np.int32)
            indices.flags.writeable = False  # the next caller gets the same array
            self._last = Owned(slots, indices, len(np.unique(indices)) == len(indices))
        return self._last

    def check(self, slot: Slot) -> int:
        """Return the index, if `slot` still owns its seat; raise SlotError otherwise."""
        index = slot.index
        if not 0 <= index < self.num_slots:
            raise SlotError(f"slot {index}: there are {self.num_slots} slots")
        if self._owner[index] is None or self._turn[index] != slot.turn:
            now = self._owner[index]
            raise SlotError(
                f"slot {index} was released and {f'belongs to {now!r} now' if now is not None else 'is free'}; "
                "a slot can be read by its owner alone"
            )
        return index
