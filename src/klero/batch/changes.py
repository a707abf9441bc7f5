"""Changes: what a SchedulerOutput makes of a batch, worked out and checked on copies before the batch is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from klero.batch.scheduler_output import NewSequence, SchedulerOutput, SequenceId
from klero.batch.seats import CheckedSeat, token_array
from klero.batch.step import I64
from klero.errors import BlockError, KleroError, RequestError, SlotError

if TYPE_CHECKING:
    from klero.batch.input_batch import InputBatch

NO_ROWS = np.iinfo(np.int64).max  # scored_from of a sequence of which nothing is scored
MAX_BLOCK = np.iinfo(np.int32).max


class StepPlan(NamedTuple):
    """A step of N sequences, in its order.

    ids: who. slots: int64 [N], their indices. num_computed: int64 [N], tokens before the step. num_new: int64 [N],
    tokens that it computes, drafts included. sampled: bool [N], whether the step reaches the end of what the sequence
    has. draft_ids: by place in the step. scored_from: int64 [N], NO_ROWS where nothing is scored, or None where nothing
    at all is.
    """

    ids: list[SequenceId]
    slots: I64
    num_computed: I64
    num_new: I64
    sampled: npt.NDArray[np.bool_]
    draft_ids: dict[int, tuple[int, ...]]
    scored_from: I64 | None


NOBODY = np.zeros(0, np.int64)
NO_STEP = StepPlan([], NOBODY, NOBODY, NOBODY, np.zeros(0, np.bool_), {}, None)


class Run(NamedTuple):
    """Blocks for a slot, and where in its table they begin."""

    slot: int
    place: int
    block_ids: tuple[int, ...]


class Changes:
    """One SchedulerOutput, applied to copies of a batch's columns in the order that `InputBatch.update` documents.

    index_of, num_computed, num_blocks, num_tokens: the state afterwards. A sequence that enters has no slot yet: the
    k-th stands at index num_slots + k, in plan and runs too. cleared: slots whose table starts anew. ones: slots,
    places in the table and block ids, int64 [n] each, of those who get one block more. runs: what others get.
    token_ids, draft_ids: by index. Raises RequestError, SlotError, BlockError, and what the seats raise; the batch is
    only read.
    """

    def __init__(self, batch: InputBatch, output: SchedulerOutput) -> None:
        self._batch, self._output, self._num_slots = batch, output, batch.num_slots
        self.index_of = dict(batch.index_of) if output.finished or output.new else batch.index_of
        self.num_computed = batch.computed_now()
        self.num_blocks = batch.num_blocks_of_slot.astype(np.int64)
        self.num_tokens = batch.num_tokens_of_slot()
        self._samples = batch.columns["samples"]
        self.seats: list[CheckedSeat] = []
        self.cleared: list[int] = []
        self.runs: list[Run] = []
        self.token_ids: dict[int, tuple[int, ...]] = {}
        self.draft_ids: dict[int, tuple[int, ...]] = {}
        self._one_more: list[tuple[int, int]] = []  # slots, and the one block that each gets
        self._leave()
        self._preempt()
        self._enter()
        self._change()
        self.ones = self._added_ones()
        self.plan = self._planned()

    def _leave(self) -> None:
        for id in self._output.finished:
            index = self._index("finished", id)
            del self.index_of[id]
            self.num_computed[index] = self.num_blocks[index] = 0

    def _preempt(self) -> None:
        for id in self._output.preempted:
            index = self._index("preempted", id)
            self.num_computed[index] = self.num_blocks[index] = 0
            self.cleared.append(index)

    def _enter(self) -> None:
        new, batch = self._output.new, self._batch
        if not new:
            return
        free = batch.max_num_seqs - len(self.index_of)
        if len(new) > free:
            raise SlotError(f"new: no slot for {new[free].id}: all max_num_seqs={batch.max_num_seqs} are taken")
        free = batch.seats.num_free + len(self._output.finished)
        if len(new) > free:
            raise SlotError(f"new: no slot for {new[free].id}: others hold seats that this batch did not give out")
        self.seats = batch.seats.checked(sequence.seat for sequence in new)
        lengths = [s.num_embedded + np.size(s.prompt_ids) + np.size(s.output_ids) for s in self.seats]
        self.num_computed = np.concatenate([self.num_computed, [sequence.num_computed for sequence in new]])
        self.num_blocks = np.concatenate([self.num_blocks, np.zeros(len(new), np.int64)])
        self.num_tokens = np.concatenate([self.num_tokens, lengths])
        self._samples = np.concatenate([self._samples, [sequence.samples for sequence in new]])
        gone = {batch.index_of[id] for id in self._output.finished}
        width = next((embeds.shape[1] for index, embeds in batch.embeds.items() if index not in gone), None)
        for k, (sequence, length) in enumerate(zip(new, lengths, strict=True)):
            if not isinstance(sequence.request_id, str):
                raise RequestError(f"new: request_id={sequence.request_id!r}: must be a text; the child is its Seat's")
            if sequence.id in self.index_of:
                raise RequestError(f"new: {sequence.id} is in the batch already; a sequence enters once")
            self.index_of[sequence.id] = self._num_slots + k
            if length > batch.max_len:
                raise RequestError(f"new: {sequence.id} has {length} tokens, and max_len={batch.max_len}")
            _check_computed("new", sequence.id, sequence.num_computed, length)
            width = _check_embeds(sequence, width)
            self._add_blocks("new", sequence.id, self._num_slots + k, sequence.block_ids)

    def _change(self) -> None:
        changed = self._output.changed
        ids = [change.id for change in changed]
        if len(set(ids)) != len(ids):
            twice = next(id for id in ids if ids.count(id) > 1)
            raise RequestError(f"changed: {twice} is there twice; say at once what is new about it")
        for id, block_ids, num_computed, token_ids, draft_ids, resumed in changed:
            index = self._index("changed", id)
            if index >= self._num_slots:
                raise RequestError(f"changed: {id} is new in this step; say it there")
            if resumed:
                self.num_blocks[index] = 0
                self.cleared.append(index)
            if len(block_ids) == 1:
                self._one_more.append((index, block_ids[0]))
            elif block_ids:
                self._add_blocks("changed", id, index, block_ids)
            if token_ids:
                self.token_ids[index] = self._tokens("new_token_ids", id, index, token_ids)
                self.num_tokens[index] += len(token_ids)
            if num_computed is not None:
                _check_computed("changed", id, num_computed, int(self.num_tokens[index]))
                self.num_computed[index] = num_computed
            if draft_ids:
                self.draft_ids[index] = self._tokens("draft_ids", id, index, draft_ids)

    def _index(self, where: str, id: SequenceId) -> int:
        try:
            return self.index_of[id]
        except KeyError:
            raise RequestError(f"{where}: {id} is not in the batch: it never entered, or it has finished") from None

    def _tokens(self, where: str, id: SequenceId, index: int, given: Sequence[int]) -> tuple[int, ...]:
        ids = token_array(f"{where} of {id}", given, self._batch.seats.vocab_size)
        if self.num_tokens[index] + len(ids) > self._batch.max_len:
            has = f"{self.num_tokens[index]} tokens, and max_len={self._batch.max_len}"
            raise RequestError(f"{where}: {id} has {has}: {len(ids)} more have no place")
        return tuple(ids.tolist())

    def _add_blocks(self, where: str, id: SequenceId, index: int, block_ids: tuple[int, ...]) -> None:
        """Put blocks behind those that a sequence has."""
        place, tables = int(self.num_blocks[index]), self._batch.block_tables
        held = [*tables[index, :place].tolist(), *block_ids] if place else block_ids
        if block_ids and (min(block_ids) < 0 or max(block_ids) > MAX_BLOCK):
            self._refuse_block(where, id, next(block for block in block_ids if not 0 <= block <= MAX_BLOCK))
        if len(held) > tables.shape[1]:
            self._refuse_table(where, id, len(held))
        if len(set(held)) != len(held):
            self._refuse_block(where, id, next(block for block in held if list(held).count(block) > 1), " twice")
        self.runs.append(Run(index, place, block_ids))
        self.num_blocks[index] = len(held)

    def _added_ones(self) -> tuple[I64, I64, I64]:
        """The same for all who get one block, together."""
        if not self._one_more:
            return NOBODY, NOBODY, NOBODY
        for index, block in self._one_more:
            if not 0 <= block <= MAX_BLOCK:
                self._refuse_block("changed", self._name(index), block)
        slot = np.array([index for index, _ in self._one_more])
        block_ids = np.array([block for _, block in self._one_more])
        place, tables = self.num_blocks[slot], self._batch.block_tables
        longest = int(place.max())
        if longest >= tables.shape[1]:
            self._refuse_table("changed", self._name(int(slot[np.argmax(place)])), longest + 1)
        again = tables[slot, :longest] == block_ids.astype(np.int32)[:, None]
        if again.any():  # a block that it has, or block 0 and an unused place
            again &= np.arange(longest) < place[:, None]
            for k in np.flatnonzero(again.any(axis=1)).tolist():
                self._refuse_block("changed", self._name(int(slot[k])), int(block_ids[k]), " twice")
        self.num_blocks[slot] = place + 1
        return slot, place, block_ids

    def _refuse_table(self, where: str, id: SequenceId, num_blocks: int) -> NoReturn:
        width = self._batch.block_tables.shape[1]
        if self._batch.block_size is None:
            raise BlockError(f"{where}: {id} has blocks, and this batch was made without: block_size=None")
        raise BlockError(f"{where}: {id} would have {num_blocks} blocks; its table has room for {width}; see max_len")

    def _refuse_block(self, where: str, id: SequenceId, block: int, rule: str = "") -> NoReturn:
        rule = rule or f": must be in [0, {MAX_BLOCK}]"
        raise BlockError(f"{where}: {id} would have block {block}{rule}")

    def _planned(self) -> StepPlan:
        num_tokens, ids = self._output.num_tokens, list(self._output.num_tokens)
        slots = self._slots(ids)
        num_new = np.fromiter(num_tokens.values(), np.int64, len(slots))
        computed, length, num_drafts = self.num_computed[slots], self.num_tokens[slots], np.zeros(len(slots), np.int64)
        draft_ids: dict[int, tuple[int, ...]] = {}
        if self.draft_ids:
            place_of = {slot: place for place, slot in enumerate(slots.tolist())}
            draft_ids = {place_of.get(index, -1): ids for index, ids in self.draft_ids.items()}
            if -1 in draft_ids:
                name = self._name(next(index for index in self.draft_ids if index not in place_of))
                raise RequestError(f"changed: {name} has drafts and no part in this step; they are for it alone")
            num_drafts[list(draft_ids)] = [len(ids) for ids in draft_ids.values()]
            length = length + num_drafts
        ends = computed + num_new
        sampled = self._samples[slots] & (ends == length)
        wrong = (num_new < 1) | (ends > length) | (sampled & (length >= self._batch.max_len))
        if self._batch.block_size is not None:
            wrong |= ends > self.num_blocks[slots] * self._batch.block_size
        if self.draft_ids:
            wrong |= (num_drafts > 0) & ~sampled
        if wrong.any():
            self._refuse(int(np.argmax(wrong)), slots, num_new, length)
        if num_new.sum() > self._batch.max_num_batched_tokens:
            limit = self._batch.max_num_batched_tokens
            raise RequestError(f"num_tokens: {num_new.sum()} in all, and max_num_batched_tokens={limit}")
        return StepPlan(ids, slots, computed, num_new, sampled, draft_ids, self._scored_from())

    def _slots(self, ids: list[SequenceId]) -> I64:
        """The slot index of each sequence of the step."""
        last = self._batch.plan
        if not self._output.finished and ids == last.ids:
            return last.slots
        try:
            return np.fromiter(map(self.index_of.__getitem__, ids), np.int64, len(ids))
        except KeyError:
            return np.array([self._index("num_tokens", id) for id in ids])  # says which one

    def _scored_from(self) -> I64 | None:
        scored_from, num_tokens = self._output.scored_from, self._output.num_tokens
        if not scored_from:
            return None
        for id, position in scored_from.items():
            if id not in num_tokens:
                raise RequestError(f"scored_from: {id} has no part in this step")
            if position < 0:
                raise RequestError(f"scored_from: {id} from position {position}: must be >= 0")
        return np.array([scored_from.get(id, NO_ROWS) for id in num_tokens], np.int64)

    def _refuse(self, place: int, slots: I64, num_new: I64, length: I64) -> NoReturn:
        """Say what is wrong with a sequence of the step. length: with its drafts."""
        batch, index, new, end = self._batch, int(slots[place]), int(num_new[place]), int(length[place])
        computed, name = int(self.num_computed[index]), self._name(index)
        left, about = end - computed, f"num_tokens: {new} of {name}"
        error: type[KleroError] = RequestError
        if new < 1:
            rule = "must be >= 1; leave out a sequence that has no part"
        elif new > left:
            rule = f"it has {end} tokens, {computed} of them computed, so at most {left} are left"
        elif index in self.draft_ids and not self._samples[index]:
            rule = "it verifies drafts, and it is never sampled"
        elif index in self.draft_ids and new < left:
            rule = f"a step that verifies drafts takes them all, and what stands before them: {left}"
        elif self._samples[index] and new == left and end >= batch.max_len:
            rule = f"it would be sampled, and max_len={batch.max_len} leaves no place for another token"
        else:
            error, held = BlockError, int(self.num_blocks[index])
            rule = f"its {held} blocks hold {held * (batch.block_size or 0)} tokens, and it would have {computed + new}"
        raise error(f"{about}: {rule}")

    def _name(self, index: int) -> SequenceId:
        return next(id for id, at in self.index_of.items() if at == index)


def _check_computed(where: str, id: SequenceId, num_computed: int, length: int) -> None:
    if not 0 <= num_computed <= length:
        raise RequestError(f"{where}: num_computed={num_computed} of {id}: must be in [0, {length}], its tokens")


def _check_embeds(sequence: NewSequence, width: int | None) -> int | None:
    """Raise RequestError for embeddings that are none. width: of the others in the batch; returns what it is now."""
    embeds, num_embedded = sequence.prompt_embeds, sequence.seat.num_embedded
    if embeds is None:
        if num_embedded:
            raise RequestError(f"new: {sequence.id} has num_embedded={num_embedded} and no prompt_embeds")
        return width
    if not isinstance(embeds, np.ndarray) or embeds.dtype != np.float32 or embeds.ndim != 2:
        what = f"{getattr(embeds, 'dtype', type(embeds).__name__)} {getattr(embeds, 'shape', '')}"
        raise RequestError(f"new: prompt_embeds of {sequence.id} is {what}: must be a float32 array [E, H]")
    if len(embeds) != num_embedded:
        rule = f"has {len(embeds)} rows, and its seat says num_embedded={num_embedded}"
        raise RequestError(f"new: prompt_embeds of {sequence.id} {rule}")
    if width is not None and embeds.shape[1] != width:
        raise RequestError(f"new: prompt_embeds of {sequence.id} is {embeds.shape[1]} wide, and others are {width}")
    return int(embeds.shape[1])
