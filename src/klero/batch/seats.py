"""Seats: what a sequence brings to its slot, and who can seat it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from klero.batch.history import History
from klero.batch.slots import Slot, Slots
from klero.errors import OptionError, RequestError, SlotError
from klero.params import SamplingParams


class FinishRules(Protocol):
    """What decides when a sequence is finished; `klero.finish.Finish` is one. Ends are opaque to the sampler."""

    def push(self, token_id: int, /) -> Any:
        """Take one token; the end it brings, or None."""


@dataclass(frozen=True)
class Seat:
    """A sequence that is to take a slot.

    owner: a name for messages. seed: as in SamplingParams, but given. child: index of the choice. finish: decides the
    end; None: the caller ends the sequence by releasing the slot. output_ids: what was generated before, elsewhere or
    earlier. end_token_ids: the model's end ids, which min_tokens needs. bad_word_ids: `params.bad_words` as id
    sequences, from whoever has the tokenizer. None for either: not told. num_embedded: positions before the first id
    that are given as embeddings and have no id; prompt_ids may be empty then. make_matcher:
    makes the `klero.grammar.Matcher` that it follows, at its start; the sampler lets it read output_ids.
    """

    owner: str
    params: SamplingParams
    prompt_ids: npt.ArrayLike
    seed: int
    child: int = 0
    finish: FinishRules | None = None
    output_ids: npt.ArrayLike = ()
    end_token_ids: Sequence[int] | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] | None = None
    num_embedded: int = 0
    make_matcher: Callable[[], Any] | None = None


@dataclass(frozen=True)
class CheckedSeat(Seat):
    """A seat that was found sound, its tokens arrays. by: who found it so, and need not look again."""

    by: object = None


class Seating(Protocol):
    """Who seats sequences and keeps their tokens: `Seats`, or `klero.Sampler`, which samples them too.

    history: the ids by slot; positions that are embedded are not in it.
    """

    history: History

    @property
    def vocab_size(self) -> int | None:
        """Ids are below it; None: not known."""

    @property
    def num_free(self) -> int:
        """Seats that nobody sits in."""

    def checked(self, scheduled: Iterable[Seat]) -> list[CheckedSeat]:
        """The seats with their tokens as arrays. Raises for one that cannot be seated, whatever is free."""

    def setup_step(self, scheduled: Iterable[Seat]) -> list[Slot]:
        """Seat sequences, all or none."""

    def append(self, slots: npt.NDArray[np.integer], token_ids: npt.NDArray[np.integer]) -> None:
        """Append one token to each of these slots (no slot twice)."""

    def release(self, slot: Slot) -> None:
        """Free a slot; its owner alone can."""

    def keep(self, alive: Iterable[Slot]) -> list[int]:
        """Free every slot but these, whatever was cut short before; return the free ones."""


class Seats:
    """Slots and histories and nothing else: enough for a batch whose tokens are sampled elsewhere."""

    def __init__(self, num_slots: int, max_len: int, vocab_size: int | None = None) -> None:
        if max_len < 1:
            raise OptionError(f"max_len={max_len}: must be >= 1")
        self.slots, self.history, self.vocab_size = Slots(num_slots), History(num_slots, max_len), vocab_size

    @property
    def num_free(self) -> int:
        """Seats that nobody sits in."""
        return self.slots.num_free

    def checked(self, scheduled: Iterable[Seat]) -> list[CheckedSeat]:
        """The seats with their tokens as int32; RequestError for what is no id, for no tokens, for too many."""
        return [self._checked(seat) for seat in scheduled]

    def setup_step(self, scheduled: Iterable[Seat]) -> list[Slot]:
        """Seat sequences, all or none: RequestError or SlotError leave everything as it was."""
        seats = self.checked(scheduled)
        if len(seats) > self.slots.num_free:
            raise SlotError(f"{len(seats)} sequences for {self.slots.num_free} free slots; release some first")
        taken = []
        for seat in seats:
            taken.append(self.slots.take(seat.owner))
            self.history.start(taken[-1].index, seat.prompt_ids, seat.output_ids)
        return taken

    def append(self, slots: npt.NDArray[np.integer], token_ids: npt.NDArray[np.integer]) -> None:
        """Append one token to each of these slots (no slot twice)."""
        self.history.append(slots, token_ids)

    def release(self, slot: Slot) -> None:
        """Free a slot and empty its history. Raises SlotError for anyone but the owner."""
        self.slots.release(slot)
        self.history.reset(slot.index)

    def keep(self, alive: Iterable[Slot]) -> list[int]:
        """Free every slot but these, whatever was cut short before; return the free ones."""
        free = self.slots.keep(alive)
        for index in free:
            self.history.reset(index)
        return free

    def _checked(self, seat: Seat) -> CheckedSeat:
        if isinstance(seat, CheckedSeat) and seat.by is self:
            return seat
        prompt = token_array(f"{seat.owner}: prompt_ids", seat.prompt_ids, self.vocab_size)
        output = token_array(f"{seat.owner}: output_ids", seat.output_ids, self.vocab_size)
        check_room(seat, len(prompt), len(output), self.history.max_len)
        if not 0 <= seat.child < 2**32:
            raise RequestError(f"{seat.owner}: child={seat.child}: must be in [0, 2^32 - 1]")
        return CheckedSeat(**vars(seat) | {"prompt_ids": prompt, "output_ids": output, "by": self})


def check_room(seat: Seat, num_prompt: int, num_output: int, max_len: int) -> None:
    """Raise RequestError for a seat without a token, and for one with more tokens than max_len, embedded or not."""
    if seat.num_embedded < 0:
        raise RequestError(f"{seat.owner}: num_embedded={seat.num_embedded}: must be >= 0")
    if num_prompt + seat.num_embedded < 1:
        raise RequestError(f"{seat.owner}: prompt_ids must be a non-empty list of token ids")
    length = seat.num_embedded + num_prompt + num_output
    if length > max_len:
        raise RequestError(f"{seat.owner}: {length} tokens: the history holds {max_len}")


def token_array(name: str, given: npt.ArrayLike, vocab_size: int | None) -> npt.NDArray[np.int32]:
    """Token ids as int32 [n]. Raises RequestError for anything that is no list of ids below vocab_size."""
    below = 2**31 if vocab_size is None else vocab_size
    try:
        ids = np.asarray(given)
    except (ValueError, TypeError, RuntimeError):  # ragged, or something that does not want to be an array
        ids = np.empty((0, 0))
    if ids.shape == (0,):
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= below:
        raise RequestError(f"{name}: must be token ids, integers in [0, {below - 1}]")
    return ids.astype(np.int32, copy=False)
