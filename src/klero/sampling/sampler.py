"""Sampler: the three moments of sampling over slots. Any engine can drive it; klero's own does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from klero.batch import Column, Columns, History, Slot, Slots, Step
from klero.device import Backend, choose_backend
from klero.errors import Fault, LogitsError, OptionError, ParameterError, RequestError, SlotError
from klero.params import NEUTRAL, ROW_DTYPE, SamplingParams, check_seed, seed_bits
from klero.rewrite import Bans, rewrite_rows
from klero.sampling.inputs import Logits, as_float32, read_logits
from klero.sampling.stateless import Sampled, counters, run
from klero.sampling.status import BAD, NO_TOKEN, OK, message


class FinishRules(Protocol):
    """What decides when a sequence is finished; `klero.finish.Finish` is one. Ends are opaque to the sampler."""

    def banned_ids(self) -> Sequence[int]:
        """Ids that may not be drawn next (min_tokens)."""

    def push(self, token_id: int, /) -> Any:
        """Take one token; the end it brings, or None."""


@dataclass(frozen=True)
class Seat:
    """A sequence that is to take a slot.

    owner: a name for messages. seed: as in SamplingParams, but given. child: index of the choice. finish: decides the
    end and bans ids until min_tokens; None: the caller ends the sequence by releasing the slot.
    """

    owner: str
    params: SamplingParams
    prompt_ids: npt.ArrayLike
    seed: int
    child: int = 0
    finish: FinishRules | None = None


class TokenUpdate(NamedTuple):
    """What a step brought one sequence: its new tokens, the end (or None), the message of an error (or None)."""

    slot: Slot
    token_ids: tuple[int, ...]
    finished: Any
    error: str | None = None


@dataclass(frozen=True)
class SampleState:
    """One sampling, between `sample_async` and `update_requests`.

    device: `Sampled`, arrays where the logits live. host: the same as NumPy; on the CPU the same memory, elsewhere a
    copy that was started and not awaited. bans: what was banned, by row, where anything was.
    """

    step: Step
    device: Sampled
    host: Sampled
    bans: dict[int, Bans]
    taken: list[bool] = field(default_factory=list)  # filled by update_requests, which takes a state once


COLUMNS = {
    "row": Column(ROW_DTYPE, np.array(NEUTRAL, ROW_DTYPE)),
    "seed": Column(np.uint64, 0),
    "child": Column(np.uint32, 0),
}


class Sampler:
    """Sampling over slots: `setup_step`, `sample_async`, `update_requests`, once a step, in this order.

    num_slots: sequences at a time. vocab_size: width of the logits. max_len: longest history, prompt and output.
    """

    def __init__(self, *, num_slots: int, vocab_size: int, max_len: int, backend: Backend = "auto") -> None:
        for name, value in (("vocab_size", vocab_size), ("max_len", max_len)):
            if value < 1:
                raise OptionError(f"{name}={value}: must be >= 1")
        self.vocab_size = vocab_size
        self.backend = choose_backend(backend)
        self.slots = Slots(num_slots)
        self.columns = Columns(num_slots, COLUMNS)
        self.history = History(num_slots, max_len)
        self._held: dict[int, tuple[Slot, FinishRules | None]] = {}

    def setup_step(self, scheduled: Iterable[Seat]) -> list[Slot]:
        """Seat new sequences: parameters, seed, history, finish rules. After scheduling, before the forward.

        All or none: RequestError, ParameterError or SlotError leave the sampler as it was.
        """
        seats = [self._checked(seat) for seat in scheduled]
        if len(seats) > self.slots.num_free:
            raise SlotError(f"{len(seats)} sequences for {self.slots.num_free} free slots; release some first")
        return [self._seat(seat) for seat in seats]

    def step_of(self, slots: Sequence[Slot]) -> Step:
        """Build the Step that gives each of these sequences, in this order, its next token."""
        indices = np.array([self.slots.check(slot) for slot in slots], np.int32)
        return Step.one_row_each(slots, self.history.lengths[indices], self.columns["child"][indices])

    def sample_async(self, step: Step, logits: Any) -> SampleState:
        """Sample every row and append its token to its history. After the forward; nothing here waits for the host.

        logits: [R, V] as for `klero.sample`, row r for step.slot_of_row[r]. On the CPU the work is done on return.
        SlotError for a step that is not of now (a slot released since, or sampled since); LogitsError; nothing changed.
        """
        self._check(step)
        read = self._read(step, logits)
        bans = self._bans(step)
        plain = np.array([r for r in range(step.num_rows) if r not in bans], np.int64)
        seeds, params = self.columns["seed"][step.slot_of_row], self.columns["row"][step.slot_of_row]
        out = run(read.rows, params, seeds, step.position_of_row, step.child_of_row, self.backend, chosen=plain)
        if bans:
            self._sample_rewritten(step, read, bans, out)
        token_ids, status, num_kept = out
        drawn = status == OK
        self.history.append(step.slot_of_row[drawn], token_ids[drawn])
        host = Sampled(token_ids, status, num_kept, seeds)
        device = Sampled(*(read.home(array) for array in (token_ids, status, num_kept, seeds)))
        return SampleState(step, device, host, bans)

    def update_requests(self, state: SampleState) -> list[TokenUpdate]:
        """Bring the tokens to their sequences and decide which are finished; one update for each.

        A sequence whose slot was released since it was sampled has left: its rows are dropped.
        """
        if state.taken:
            raise SlotError("this SampleState was brought to its sequences already; each is taken once")
        state.taken.append(True)
        starts = state.step.row_starts.tolist()
        updates = []
        for slot, begin, end in zip(state.step.slots, starts[:-1], starts[1:], strict=True):
            held, finish = self._held.get(slot.index, (None, None))
            if held == slot:
                updates.append(self._bring(state, slot, finish, range(begin, end)))
        return updates

    def tokens(self, slot: Slot) -> npt.NDArray[np.int32]:
        """The history of a sequence, prompt first; a copy. Raises SlotError for anyone but the owner."""
        return self.history.tokens(self.slots.check(slot))

    def release(self, slot: Slot) -> None:
        """Free a slot and put the neutral values back. Raises SlotError for anyone but the owner."""
        self.slots.release(slot)
        self.columns.reset(slot.index)
        self.history.reset(slot.index)
        del self._held[slot.index]

    def keep(self, alive: Iterable[Slot]) -> list[int]:
        """Release every slot but these, whatever an exception cut short before; return the free ones."""
        free = self.slots.keep(alive)
        for index in free:
            self.columns.reset(index)
            self.history.reset(index)
            self._held.pop(index, None)
        return free

    def _checked(self, seat: Seat) -> Seat:
        """The seat with its seed as bits and its prompt as an array, if it can be seated."""
        prompt = np.asarray(seat.prompt_ids)
        if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
            raise RequestError(f"{seat.owner}: prompt_ids must be a non-empty list of token ids")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise RequestError(f"{seat.owner}: prompt_ids must be in [0, {self.vocab_size - 1}], the logits width")
        if prompt.size > self.history.max_len:
            raise RequestError(f"{seat.owner}: {prompt.size} prompt tokens: the history holds {self.history.max_len}")
        (child,) = counters("child", seat.child, 1)
        seed = check_seed("seed", seat.seed)
        if seed is None:
            raise ParameterError([Fault("seed", None, "must be given: the engine draws one at admission")])
        return dataclasses.replace(seat, prompt_ids=prompt, seed=seed_bits(seed), child=int(child))

    def _seat(self, seat: Seat) -> Slot:
        slot = self.slots.take(seat.owner)
        self.history.start(slot.index, seat.prompt_ids)
        self.columns.write(slot.index, row=np.array(seat.params.row, ROW_DTYPE), seed=seat.seed, child=seat.child)
        self._held[slot.index] = (slot, seat.finish)
        return slot

    def _check(self, step: Step) -> None:
        """Refuse a step whose slots have other owners by now, or that is not the next of each of them."""
        for slot in step.slots:
            self.slots.check(slot)
        if len(set(step.slots)) != len(step.slots):
            raise SlotError("a step has the same slot twice; give each sequence one place in it")
        lengths = self.history.lengths[step.slot_of_row]
        if np.any(lengths != step.position_of_row):
            r = int(np.argmax(lengths != step.position_of_row))
            raise SlotError(
                f"slot {step.slot_of_row[r]}: the step is for position {step.position_of_row[r]}, "
                f"and {lengths[r]} comes next; build a new one with step_of"
            )
        if np.any(lengths >= self.history.max_len):
            full = int(step.slot_of_row[np.argmax(lengths)])
            raise SlotError(f"slot {full}: its history holds max_len={self.history.max_len} tokens; release it")

    def _read(self, step: Step, logits: Any) -> Logits:
        read = read_logits(logits)
        if read.rows.shape != (step.num_rows, self.vocab_size):
            raise LogitsError(
                f"logits with shape {read.rows.shape}: this step has {step.num_rows} rows of {self.vocab_size}"
            )
        return read

    def _bans(self, step: Step) -> dict[int, Bans]:
        """The rows that need rewriting, with their bans."""
        bans = {}
        for r, index in enumerate(step.slot_of_row.tolist()):
            _, finish = self._held[index]
            ids = [i for i in finish.banned_ids() if 0 <= i < self.vocab_size] if finish else []
            if ids:
                bans[r] = Bans("min_tokens", ids)
        return bans

    def _sample_rewritten(
        self, step: Step, read: Logits, bans: dict[int, Bans], out: Sequence[npt.NDArray[Any]]
    ) -> None:
        """Sample copies of the rows that are rewritten, and put the results beside the others'."""
        chosen = np.array(list(bans), np.int64)
        rows = as_float32(read.rows[chosen])  # a copy: indexing with an array makes one
        bad = rewrite_rows(rows, list(bans.values()))
        slots = step.slot_of_row[chosen]
        seeds, params = self.columns["seed"][slots], self.columns["row"][slots]
        positions, children = step.position_of_row[chosen], step.child_of_row[chosen]
        results: Sequence[npt.NDArray[Any]] = run(rows, params, seeds, positions, children, self.backend)
        for array, result, failed in zip(out, results, (NO_TOKEN, BAD, 0), strict=True):
            result[bad] = failed
            array[chosen] = result

    def _bring(self, state: SampleState, slot: Slot, finish: FinishRules | None, rows: range) -> TokenUpdate:
        """Push the tokens of one sequence; what goes wrong in it is its own error alone."""
        token_ids: list[int] = []
        for r in rows:
            status = int(state.host.status[r])
            if status != OK:
                rules = [state.bans[r].rule] if r in state.bans else []
                error = message(status, int(state.step.position_of_row[r]), rules)
                return TokenUpdate(slot, tuple(token_ids), None, error)
            token_ids.append(int(state.host.token_ids[r]))
            try:
                finished = finish.push(token_ids[-1]) if finish else None
            except Exception as error:  # a tokenizer or a caller's rules may raise anything; the neighbours go on
                return TokenUpdate(slot, tuple(token_ids), None, f"{type(error).__name__}: {error}")
            if finished is not None:
                return TokenUpdate(slot, tuple(token_ids), finished)
        return TokenUpdate(slot, tuple(token_ids), None)
