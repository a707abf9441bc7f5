"""Sampler: the three moments of sampling over slots. Any engine can drive it; klero's own does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch import Column, Columns, History, Slot, Slots, Step
from klero.batch.seats import CheckedSeat, FinishRules, Seat
from klero.batch.step import NO_DRAFT
from klero.device import Backend, choose_backend
from klero.errors import STOPS, LogitsError, OptionError, RequestError, SlotError, told
from klero.grammar.masks import Masks
from klero.grammar.matchers import Matchers
from klero.logprobs import Asks, asks_of
from klero.params import NEUTRAL, ROW_DTYPE, SamplingParams
from klero.params.decay import next_top_p, top_p_after
from klero.rewrite import Context, Rules
from klero.rows.inputs import Logits, read_logits, width_without_padding
from klero.sampling.contexts import read_masks
from klero.sampling.seating import checked_seat
from klero.sampling.status import EMPTY, NO_TOKEN, OK
from klero.sampling.work import Patched, Sampled, Work, is_hosted


class TokenUpdate(NamedTuple):
    """What a step brought one sequence: its new tokens, the end (or None), the message of an error (or None).

    rows: those of the step that the tokens came from, one for each, for `SampleState.host.logprobs`.
    """

    slot: Slot
    token_ids: tuple[int, ...]
    finished: Any
    error: str | None = None
    rows: range = range(0)


@dataclass(frozen=True)
class SampleState:
    """One sampling, between `sample_async` and `update_requests`.

    device: `Sampled`, arrays where the logits live. host: the same as NumPy; on the CPU the same memory, elsewhere a
    copy that was started and not awaited.
    """

    step: Step
    device: Sampled
    host: Sampled
    taken: list[bool] = field(default_factory=list)  # filled by update_requests, which takes a state once


NOTHING = SamplingParams()  # of a row that wants its token alone
COLUMNS = {
    "row": Column(ROW_DTYPE, np.array(NEUTRAL, ROW_DTYPE)),
    "seed": Column(np.uint64, 0),
    "child": Column(np.uint32, 0),
    "num_embedded": Column(np.int32, 0),  # positions before the history's first id
    "plain": Column(np.bool_, True),  # its rows are sampled as they are, and nothing but the history remembers a token
    "hosted": Column(np.bool_, False),
    "asks": Column(np.bool_, False),
    "decays": Column(np.bool_, False),
    "top_p": Column(np.uint64, 0),  # P of the next token, where it decays
}


class Seated(NamedTuple):
    """What the sampler keeps of a sequence beside its columns."""

    slot: Slot
    seat: Seat


class Sampler:
    """Sampling over slots: `setup_step`, `sample_async`, `update_requests`, once a step, in this order.

    num_slots: sequences at a time. vocab_size: width of the logits. max_len: longest sequence, prompt and output;
    embedded positions count, although histories hold ids alone, so that no rule ever sees a placeholder. padded_from:
    columns from here on are padding, never read and never drawn; None: there is none.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        max_len: int,
        padded_from: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        for name, value in (("vocab_size", vocab_size), ("max_len", max_len)):
            if value < 1:
                raise OptionError(f"{name}={value}: must be >= 1")
        self.vocab_size, self.padded_from = vocab_size, width_without_padding(padded_from, vocab_size)
        self.backend = choose_backend(backend)
        self.slots = Slots(num_slots)
        self.columns = Columns(num_slots, COLUMNS)
        self.history = History(num_slots, max_len)
        self.rules = None if self.backend == "reference" else Rules(num_slots, self.padded_from, self.history)
        self.matchers = Matchers(self.padded_from)
        self._held: dict[int, Seated] = {}

    @property
    def num_free(self) -> int:
        """Seats that nobody sits in."""
        return self.slots.num_free

    def checked(self, scheduled: Iterable[Seat]) -> list[CheckedSeat]:
        """The seats with seeds as bits and tokens as arrays. Raises for one that `setup_step` would refuse."""
        return [self._checked(seat) for seat in scheduled]

    def setup_step(self, scheduled: Iterable[Seat]) -> list[Slot]:
        """Seat new sequences: parameters, seed, history, finish rules. After scheduling, before the forward.

        All or none: RequestError, ParameterError or SlotError leave the sampler as it was.
        """
        seats = self.checked(scheduled)
        if len(seats) > self.slots.num_free:
            raise SlotError(f"{len(seats)} sequences for {self.slots.num_free} free slots; release some first")
        taken: list[Slot] = []
        try:
            for seat in seats:
                taken.append(self.slots.take(seat.owner))
                self._seat(taken[-1], seat)
        except BaseException:
            for slot in taken:
                self.release(slot)
            raise
        return taken

    def step_of(self, slots: Sequence[Slot]) -> Step:
        """Build the Step that gives each of these sequences, in this order, its next token."""
        owned = self.slots.owned(slots)
        positions, children = self._next_positions(owned.indices), self.columns["child"].take(owned.indices)
        return Step.one_row_each(owned.slots, positions, children, owned.indices)

    def begin_masks(self, step: Step) -> None:
        """Let the matchers of a step's rows make their masks in the background. Before the forward; may be left out."""
        self.matchers.begin(step.slot_of_row[: step.row_starts[-1]])

    def sample_async(self, step: Step, logits: Any, masks: Any = None) -> SampleState:
        """Sample every row and append its token to its history. After the forward; nothing here waits for the host.

        logits: [R, V] as for `klero.sample`, row r for step.slot_of_row[r]; masks: as there, beside those of matchers.
        Padding rows (`Step.padded`) are not read: their token is -1, and nobody's state is touched. On the CPU the work
        is done on return. SlotError for a step that is not of now (a slot released since, or sampled since);
        LogitsError, ParameterError; nothing changed.
        """
        self._check(step)
        read, slots, num_real = self._read(step, logits), step.slot_of_row, int(step.row_starts[-1])
        plain = masks is None and self._all_plain(slots[:num_real])
        work = Work(
            read.rows, self.padded_from, self.columns["row"].take(slots), self.columns["seed"].take(slots),
            step.position_of_row, step.child_of_row, self.backend, None if plain else self._asks(slots),
        )  # fmt: skip
        if plain:
            work.run_plain(np.arange(num_real))
        else:
            self._run_by_roads(work, step, masks)
        if num_real < len(slots):
            for of_row, value in zip(work.out, (NO_TOKEN, EMPTY, 0), strict=True):
                of_row[num_real:] = value
        everyone = num_real == len(slots) and not work.messages
        drawn = slice(None) if everyone else np.flatnonzero(work.status == OK)
        self.history.append(slots[drawn], work.token_ids[drawn])
        if not plain:
            self._remember(slots[drawn], work.token_ids[drawn])
        host = work.sampled()
        return SampleState(step, host if read.home is np.asarray else work.sampled(read.home), host)

    def update_requests(self, state: SampleState) -> list[TokenUpdate]:
        """Bring the tokens to their sequences and decide which are finished; one update for each.

        A sequence whose slot was released since it was sampled has left: its rows are dropped.
        """
        if state.taken:
            raise SlotError("this SampleState was brought to its sequences already; each is taken once")
        state.taken.append(True)
        starts, status = state.step.row_starts.tolist(), state.host.status.tolist()
        token_ids = state.host.token_ids.tolist()
        updates = []
        for slot, begin, end in zip(state.step.slots, starts[:-1], starts[1:], strict=True):
            held = self._held.get(slot.index)
            if held is None or (held.slot is not slot and held.slot != slot):
                continue
            finish = held.seat.finish
            if finish is None and end - begin == 1 and status[begin] == OK:
                updates.append(TokenUpdate(slot, (token_ids[begin],), None, None, range(begin, end)))
            else:
                updates.append(self._bring(state, slot, finish, range(begin, end)))
        return updates

    def tokens(self, slot: Slot) -> npt.NDArray[np.int32]:
        """The history of a sequence, prompt first; a copy. Raises SlotError for anyone but the owner."""
        return self.history.tokens(self.slots.check(slot))

    def append(self, slots: npt.NDArray[np.integer], token_ids: npt.NDArray[np.integer]) -> None:
        """Append one token to each slot (no slot twice): histories, counts, n-grams and decays take it.

        RequestError for what is no id, SlotError for a slot whose history is full; nothing changed.
        """
        if np.any((token_ids < 0) | (token_ids >= self.vocab_size)):
            raise RequestError(f"token_ids={token_ids.tolist()}: must be integers in [0, {self.vocab_size - 1}]")
        self._check_room(slots, self._next_positions(slots))
        self.history.append(slots, token_ids)
        self._remember(slots, token_ids)

    def _remember(self, slots: npt.NDArray[np.integer], token_ids: npt.NDArray[np.integer]) -> None:
        """Let what follows the tokens of these slots take one each; their histories have it already."""
        if self.rules is not None:
            self.rules.append(slots, token_ids)
        self.matchers.append(slots, token_ids)
        for k in np.flatnonzero(self.columns["decays"][slots]).tolist():
            index = int(slots[k])
            params, top_p = self._held[index].seat.params, int(self.columns["top_p"][index])
            assert params.decay is not None
            self.columns["top_p"][index] = top_p = next_top_p(top_p, params.decay, int(token_ids[k]))
            self.columns["row"][index] = params.row_at(top_p)

    def release(self, slot: Slot) -> None:
        """Free a slot and put the neutral values back. Raises SlotError for anyone but the owner."""
        self.slots.release(slot)
        self._reset(slot.index)

    def keep(self, alive: Iterable[Slot]) -> list[int]:
        """Release every slot but these, whatever an exception cut short before; return the free ones."""
        free = self.slots.keep(alive)
        for index in free:
            self._reset(index)
        return free

    def _reset(self, index: int) -> None:
        """Empty a slot."""
        if self.rules is not None:
            self.rules.reset(index)
        self.matchers.reset(index)
        self.columns.reset(index)
        self.history.reset(index)
        self._held.pop(index, None)

    def _checked(self, seat: Seat) -> CheckedSeat:
        """The seat with its seed as bits and its tokens as arrays, if it can be seated."""
        if isinstance(seat, CheckedSeat) and seat.by is self:
            return seat
        return checked_seat(seat, self.vocab_size, self.padded_from, self.history.max_len, by=self)

    def _seat(self, slot: Slot, seat: Seat) -> None:
        params, output = seat.params, np.asarray(seat.output_ids)
        self.history.start(slot.index, seat.prompt_ids, output)
        self._held[slot.index] = Seated(slot, seat)
        top_p = 0 if params.decay is None else top_p_after(params.decay, output.tolist())
        row = params.row if params.decay is None else params.row_at(top_p)
        self.columns.write(
            slot.index, row=np.array(row, ROW_DTYPE), seed=seat.seed, child=seat.child,
            plain=params.plain and seat.make_matcher is None and self.rules is not None, hosted=is_hosted(params),
            decays=params.decay is not None, top_p=top_p, asks=params.asks, num_embedded=seat.num_embedded,
        )  # fmt: skip
        if self.rules is not None and (params.rewrites or params.min_tokens):
            self.rules.start(slot.index, self._context(slot.index))
        if seat.make_matcher is not None:
            self.matchers.start(slot.index, seat.make_matcher, output.tolist())

    def _context(self, index: int, masks: Masks | None = None, r: int = 0) -> Context:
        """What the rewriting of a slot's next row depends on."""
        seat, tokens = self._held[int(index)].seat, self.history.tokens(int(index))
        num_prompt = self.history.prompt_lengths[index]
        mask = None if masks is None else masks.row(r)
        ends = tuple(seat.end_token_ids or ())
        return Context(seat.params, tokens[:num_prompt], tokens[num_prompt:], ends, seat.bad_word_ids or (), mask)

    def _asks(self, slots: npt.NDArray[np.int32]) -> Asks | None:
        """What the rows want beside a token."""
        asking = self.columns["asks"][slots]
        if not asking.any():
            return None
        pairs = zip(slots.tolist(), asking.tolist(), strict=True)
        return asks_of([self._held[i].seat.params if asks else NOTHING for i, asks in pairs], self.padded_from)

    def _masks(self, step: Step, given: Any) -> tuple[Masks, dict[int, str]]:
        """The masks of a step's rows, those of matchers and those given; what went wrong with a matcher, by row."""
        words = read_masks(given, step.num_rows, self.vocab_size, self.padded_from)
        masks, failed = self.matchers.masks(step.slot_of_row[: step.row_starts[-1]])
        if step.num_rows > len(masks.of_row):
            of_row = np.pad(masks.of_row, (0, step.num_rows - len(masks.of_row)), constant_values=-1)
            masks = masks._replace(of_row=of_row)
        return masks if words is None else masks.joined(Masks.given(words)), failed

    def _all_plain(self, slots: npt.NDArray[np.integer]) -> bool:
        """Whether rows of these slots are sampled as they are, unless masks are given: none has a matcher either."""
        return bool(np.count_nonzero(self.columns["plain"].take(slots)) == len(slots))

    def _run_by_roads(self, work: Work, step: Step, masks: Any) -> None:
        """Sample the rows before the padding, each on its road; those whose matcher failed get no token."""
        (allowed, failed), slots = self._masks(step, masks), step.slot_of_row
        sound = np.arange(len(slots)) < step.row_starts[-1]
        sound[list(failed)] = False
        patched, hosted = (rows & sound for rows in self._roads(slots, allowed))
        work.run_plain(np.flatnonzero(sound & ~(patched | hosted)))
        if patched.any():
            self._run_patched(work, slots, np.flatnonzero(patched), allowed)
        if hosted.any():
            work.run_hosted({r: self._context(slots[r], allowed, r) for r in np.flatnonzero(hosted).tolist()})
        for r, what in failed.items():
            work.refuse(r, what)

    def _roads(self, slots: npt.NDArray[np.int32], masks: Masks) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which rows a kernel rewrites, and which the reference does."""
        if self.rules is None:
            return np.zeros(len(slots), bool), np.ones(len(slots), bool)
        hosted = self.columns["hosted"][slots]
        patched = self.rules.patched(slots) | self.columns["asks"][slots] | (masks.of_row >= 0)
        return patched & ~hosted, hosted

    def _run_patched(
        self, work: Work, slots: npt.NDArray[np.int32], chosen: npt.NDArray[np.int64], masks: Masks
    ) -> None:
        """Sample the rows whose rules the kernel applies."""
        assert self.rules is not None
        bound = chosen[(masks.of_row[chosen] >= 0) & self.rules.awaits_min_tokens(slots[chosen])]
        free = [r for r in bound.tolist() if not self._context(slots[r], masks, r).awaits_min_tokens]
        rules = self.rules.arrays(without_min_tokens=slots[free])
        patched = Patched(rules, slots, *self.rules.masks(slots).joined(masks))
        work.run_patched(chosen, patched, lambda r: self._context(slots[r], masks, r))

    def _next_positions(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """The absolute index of the token that comes next in each of these slots."""
        positions: npt.NDArray[np.int32] = self.history.lengths.take(indices)
        positions += self.columns["num_embedded"].take(indices)
        return positions

    def _check(self, step: Step) -> None:
        """Refuse a step whose slots have other owners by now, or that is not the next of each of them."""
        if not self.slots.owned(step.slots).distinct:
            raise SlotError("a step has the same slot twice; give each sequence one place in it")
        if np.count_nonzero(step.draft_of_row != NO_DRAFT):
            r = int(np.argmax(step.draft_of_row != NO_DRAFT))
            raise SlotError(
                f"slot {step.slot_of_row[r]}: row {r} verifies draft {step.draft_of_row[r]}, and this sampler draws "
                "one token a step; schedule without draft_ids"
            )
        slot_of_row, position_of_row = step.slot_of_row[: len(step.slots)], step.position_of_row[: len(step.slots)]
        comes_next = self._next_positions(slot_of_row)
        if np.count_nonzero(comes_next.view(np.uint32) != position_of_row):  # one type: NumPy is quick then
            r = int(np.argmax(comes_next != position_of_row))
            raise SlotError(
                f"slot {step.slot_of_row[r]}: the step is for position {step.position_of_row[r]}, "
                f"and {comes_next[r]} comes next; build a new one with step_of"
            )
        self._check_room(slot_of_row, comes_next)

    def _check_room(self, indices: npt.NDArray[np.integer], comes_next: npt.NDArray[np.int32]) -> None:
        """Raise SlotError for a slot that has no place for another token."""
        if np.count_nonzero(comes_next >= self.history.max_len):
            full = int(indices[np.argmax(comes_next)])
            raise SlotError(f"slot {full}: its history holds max_len={self.history.max_len} tokens; release it")

    def _read(self, step: Step, logits: Any) -> Logits:
        read = read_logits(logits)
        if read.rows.shape != (step.num_rows, self.vocab_size):
            raise LogitsError(
                f"logits with shape {read.rows.shape}: this step has {step.num_rows} rows of {self.vocab_size}"
            )
        return read

    def _bring(self, state: SampleState, slot: Slot, finish: FinishRules | None, rows: range) -> TokenUpdate:
        """Push the tokens of one sequence; what goes wrong in it is its own error alone."""
        token_ids: list[int] = []

        def update(finished: Any, error: str | None = None) -> TokenUpdate:
            return TokenUpdate(slot, tuple(token_ids), finished, error, rows[: len(token_ids)])

        for r in rows:
            status = int(state.host.status[r])
            if status != OK:
                return update(None, state.host.messages[r])
            token_ids.append(int(state.host.token_ids[r]))
            try:
                finished = finish.push(token_ids[-1]) if finish else None
            except STOPS:
                raise
            except BaseException as error:  # a tokenizer or a caller's rules may raise anything; the neighbours go on
                return update(None, told(error))
            if finished is not None:
                return update(finished)
        return update(None)
