"""InputBatch: who is seated, with which blocks, and the arrays of a step. Filled every step, not built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.batch.changes import NO_STEP, Changes, StepPlan
from klero.batch.columns import Column, Columns
from klero.batch.scheduler_output import NewSequence, SchedulerOutput, SequenceId
from klero.batch.seats import Seating
from klero.batch.slots import Slot
from klero.batch.step import I32, I64, NO_DRAFT, Step, StepArrays
from klero.errors import OptionError, RequestError, SlotError


class Memory:
    """The arrays of the widest step, made once; a step is the first part of each. embeds: made when it is needed."""

    def __init__(self, max_tokens: int, max_seqs: int, table_width: int) -> None:
        self.input_ids, self.positions = np.zeros((2, max_tokens), np.int32)
        self.slot_mapping, self.logits_rows = np.zeros((2, max_tokens), np.int64)
        self.num_computed, self.seq_lens, self.slots = np.zeros((3, max_seqs), np.int32)
        self.query_starts = np.zeros(max_seqs + 1, np.int32)
        self.block_tables = np.zeros((max_seqs, table_width), np.int32)
        self.is_embedded = np.zeros(max_tokens, np.bool_)
        self.embeds = np.zeros((max_tokens, 0), np.float32)


class InputBatch:
    """The sequences that are seated, what is known of each by slot, and the arrays of the step that comes next.

    max_num_seqs: sequences at a time. max_num_batched_tokens: tokens of the widest step. max_len: longest sequence,
    embedded positions included. block_size: None for a model that owns its sequences; there are no blocks then. seats:
    takes slots and keeps tokens; sequences of this batch are seated and released by this batch alone.

    index_of: slot index by sequence. columns: what is known by slot, one declaration for each. Of them, block_tables:
    int32 [S, W], the blocks of each slot in order, unused places 0; num_blocks_of_slot: int32 [S], how many are in use;
    num_computed: int32 [S], tokens computed before the step. embeds: prompt_embeds by slot index. plan: the step.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_len: int,
        block_size: int | None,
        seats: Seating,
    ) -> None:
        self.num_slots, size = len(seats.history.lengths), 1 if block_size is None else block_size
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "max_len": max_len}
        for name, value in (sizes | {"block_size": size}).items():
            if value < 1:
                raise OptionError(f"{name}={value}: must be >= 1")
        if max_num_seqs > self.num_slots or max_len > seats.history.max_len:
            seated = f"{self.num_slots} slots for {seats.history.max_len} tokens each"
            raise OptionError(f"max_num_seqs={max_num_seqs}, max_len={max_len}: the seats are {seated}")
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_len, self.block_size, self.seats = max_len, block_size, seats
        width = 0 if block_size is None else -(-max_len // size)
        declared = {
            "block_tables": Column(np.int32, 0, (width,)),
            "num_blocks": Column(np.int32, 0),
            "num_computed": Column(np.int32, 0),
            "num_embedded": Column(np.int32, 0),
            "child": Column(np.uint32, 0),
            "samples": Column(np.bool_, False),
        }
        self.columns = Columns(self.num_slots, declared)
        self.block_tables: I32 = self.columns["block_tables"]
        self.num_blocks_of_slot: I32 = self.columns["num_blocks"]
        self.num_computed: I32 = self.columns["num_computed"]
        self.index_of: dict[SequenceId, int] = {}
        self.embeds: dict[int, npt.NDArray[np.float32]] = {}
        self._slots: list[Slot | None] = [None] * self.num_slots
        self._sequences: list[NewSequence | None] = [None] * self.num_slots
        self._memory = Memory(max_num_batched_tokens, max_num_seqs, width)
        self.plan: StepPlan = NO_STEP
        self._owners: tuple[I64, tuple[Slot, ...]] | None = None  # of the rows of the last step, until somebody leaves

    @property
    def num_seqs(self) -> int:
        """Sequences that are seated, with a part in the step or without."""
        return len(self.index_of)

    def __contains__(self, id: object) -> bool:
        return id in self.index_of

    def slot_of(self, id: SequenceId) -> Slot:
        """The slot of a sequence. Raises RequestError for one that is not seated."""
        slot = self._slots[self.index_of[id]] if id in self.index_of else None
        if slot is None:
            raise RequestError(f"{id} is not in the batch: it never entered, or it has finished")
        return slot

    def sequence_of(self, slot: Slot) -> NewSequence:
        """What entered in a slot. Raises SlotError for one that is not its owner's any more."""
        sequence = self._sequences[slot.index] if 0 <= slot.index < self.num_slots else None
        if sequence is None or self._slots[slot.index] != slot:
            raise SlotError(f"slot {slot.index}: whoever had it in turn {slot.turn} has left the batch")
        return sequence

    def update(self, output: SchedulerOutput) -> None:
        """Apply what a scheduler decided, in this order.

        1. The last step counts as computed; of its drafts, those that the history has taken.
        2. finished: slots and blocks are free. 3. preempted: blocks and computed tokens are gone. 4. new: each takes a
        slot. 5. changed: blocks, tokens, what is computed, drafts. 6. The step of num_tokens, which `fill` lays out.

        Everything is checked first, as the state will be when its turn comes: RequestError, BlockError, SlotError, and
        what the seats raise for a seat, leave the batch as it was, the last step included. A finished name may enter
        again in the same record.
        """
        changes = Changes(self, output)
        for id in output.finished:
            self._leave(id)
        if changes.cleared:
            self.block_tables[changes.cleared] = 0
        self.num_computed[:] = changes.num_computed[: self.num_slots]
        self.num_blocks_of_slot[:] = changes.num_blocks[: self.num_slots]
        plan, index_of = changes.plan, np.arange(self.num_slots)
        if output.new:
            index_of = np.concatenate([index_of, self._enter(output.new, changes)])
            plan = plan._replace(slots=index_of[plan.slots])
        for slot, place, block_ids in changes.runs:
            self.block_tables[index_of[slot], place : place + len(block_ids)] = block_ids
        slots, places, ones = changes.ones
        self.block_tables[slots, places] = ones
        self._append(changes.token_ids)
        self.plan = plan

    def keep(self, alive: Iterable[SequenceId]) -> list[int]:
        """Drop every sequence but these, whatever an exception cut short before; return the free slots.

        The last step counts as computed; a scheduler that does not know what became of it sends them as preempted.
        """
        kept = {id: index for id in alive if (index := self.index_of.get(id)) is not None}
        computed, self.plan = self.computed_now(), NO_STEP
        self.num_computed[:] = computed
        slots = [slot for slot in map(self._slots.__getitem__, kept.values()) if slot is not None]
        free = self.seats.keep(slots)
        self.index_of = kept
        for index in free:
            self._clear(index)
        return free

    def fill(self) -> tuple[StepArrays, Step]:
        """Lay out the step of the last `update`: for the model, and for the sampler.

        The arrays of StepArrays are views of memory made once, valid until the next `fill`; those of Step are its own,
        because what is sampled may be looked at a step later.
        """
        plan, memory = self.plan, self._memory
        num_seqs = len(plan.slots)
        starts = memory.query_starts[: num_seqs + 1]
        starts[0] = 0
        starts[1:] = np.cumsum(plan.num_new)  # straight into int32 it would take longer
        num_tokens = int(starts[-1])
        seq = np.arange(num_seqs)  # of each token: its sequence
        slot_of_token, positions = plan.slots, plan.num_computed
        if num_tokens > num_seqs:  # else each has one token
            seq = np.repeat(seq, plan.num_new)
            slot_of_token = plan.slots[seq]
            positions = (plan.num_computed - starts[:-1])[seq]
            positions += np.arange(num_tokens)
        memory.positions[:num_tokens] = positions
        self._fill_ids(slot_of_token, positions, starts)
        width = self._fill_blocks(slot_of_token, positions)
        memory.num_computed[:num_seqs] = plan.num_computed
        memory.seq_lens[:num_seqs] = plan.num_computed + plan.num_new
        memory.slots[:num_seqs] = plan.slots
        step, sampled_rows = self._step(starts)
        rows = self._fill_rows(seq, positions, sampled_rows)
        embeds, is_embedded = self._fill_embeds(starts)
        arrays = StepArrays(
            memory.input_ids[:num_tokens], memory.positions[:num_tokens], memory.slot_mapping[:num_tokens], starts,
            memory.seq_lens[:num_seqs], memory.block_tables[:num_seqs, :width], memory.slots[:num_seqs], rows,
            len(sampled_rows), memory.num_computed[:num_seqs], embeds, is_embedded,
        )  # fmt: skip
        return arrays, step

    def computed_now(self) -> I64:
        """int64 [S]: tokens computed, now that the last step is done; a copy."""
        computed, plan, history = self.num_computed.astype(np.int64), self.plan, self.seats.history
        computed[plan.slots] = plan.num_computed + plan.num_new
        for place, draft_ids in plan.draft_ids.items():
            slot, num_drafts = int(plan.slots[place]), len(draft_ids)
            computed[slot] -= num_drafts
            first = int(computed[slot] - self.columns["num_embedded"][slot])
            taken = history.ids[slot, first : min(first + num_drafts, int(history.lengths[slot]))].tolist()
            differs = (k for k, (token, draft) in enumerate(zip(taken, draft_ids, strict=False)) if token != draft)
            computed[slot] += next(differs, len(taken))
        return computed

    def num_tokens_of_slot(self) -> I64:
        """int64 [S]: tokens of each slot, embedded ones included; a copy."""
        return self.columns["num_embedded"] + self.seats.history.lengths.astype(np.int64)

    def _enter(self, new: tuple[NewSequence, ...], changes: Changes) -> list[int]:
        """Seat new sequences; return their slots."""
        slots = self.seats.setup_step(changes.seats)
        for k, (slot, sequence) in enumerate(zip(slots, new, strict=True)):
            index, at = slot.index, self.num_slots + k
            self._slots[index], self._sequences[index] = slot, sequence
            self.index_of[sequence.id] = index
            if sequence.prompt_embeds is not None:
                self.embeds[index] = sequence.prompt_embeds
            self.columns.write(
                index, num_blocks=changes.num_blocks[at], num_computed=changes.num_computed[at],
                num_embedded=sequence.seat.num_embedded, child=sequence.seat.child, samples=sequence.samples,
            )  # fmt: skip
        return [slot.index for slot in slots]

    def _leave(self, id: SequenceId) -> None:
        self.seats.release(self.slot_of(id))
        self._clear(self.index_of.pop(id))

    def _clear(self, index: int) -> None:
        """Forget everything about a slot."""
        self.columns.reset(index)
        self.embeds.pop(index, None)
        self._slots[index] = self._sequences[index] = self._owners = None

    def _append(self, token_ids: dict[int, tuple[int, ...]]) -> None:
        """Append tokens that were sampled elsewhere, one to each slot at a time."""
        for k in range(max(map(len, token_ids.values()), default=0)):
            slots = [slot for slot, ids in token_ids.items() if k < len(ids)]
            self.seats.append(np.array(slots, np.int32), np.array([token_ids[slot][k] for slot in slots], np.int32))

    def _fill_ids(self, slot_of_token: I64, positions: I64, starts: I32) -> None:
        """Which token stands at each position; 0 where it is embedded."""
        ids, out = self.seats.history.ids, self._memory.input_ids[: len(positions)]
        places = slot_of_token * ids.shape[1]
        places += positions
        if self.embeds:
            places -= self.columns["num_embedded"][slot_of_token]
        np.take(ids.reshape(-1), places, out=out, mode="clip")
        if self.embeds:
            out[positions < self.columns["num_embedded"][slot_of_token]] = 0
        for place, draft_ids in self.plan.draft_ids.items():
            end = starts[place + 1]
            out[end - len(draft_ids) : end] = draft_ids

    def _fill_blocks(self, slot_of_token: I64, positions: I64) -> int:
        """Where each token's K/V goes, block * block_size + offset, or -1 where there are no blocks.

        Fills the block tables too, and returns the number of blocks of the longest.
        """
        plan, memory, size, tables = self.plan, self._memory, self.block_size, self.block_tables
        mapping = memory.slot_mapping[: len(positions)]
        if size is None:
            mapping[:] = -1
            return 0
        block_of_sequence = positions // size
        places = slot_of_token * tables.shape[1]
        places += block_of_sequence
        np.subtract(tables.reshape(-1)[places], block_of_sequence, out=mapping)
        mapping *= size
        mapping += positions  # block * size + (position - block_of_sequence * size)
        width, out = int(self.num_blocks_of_slot[plan.slots].max(initial=0)), memory.block_tables[: len(plan.slots)]
        if 2 * width > out.shape[1]:  # whole rows are copied faster than parts of them
            np.take(tables, plan.slots, axis=0, out=out, mode="clip")
        else:
            out[:, :width] = tables[plan.slots, :width]
        return width

    def _fill_rows(self, seq: I64, positions: I64, sampled_rows: I64) -> I64:
        """Which tokens give a row: those that are sampled, then those that are scored."""
        rows, scored_from = sampled_rows, self.plan.scored_from
        if scored_from is not None:
            scored = positions >= scored_from[seq]
            scored[sampled_rows] = False
            rows = np.append(sampled_rows, np.flatnonzero(scored))
        out = self._memory.logits_rows[: len(rows)]
        out[:] = rows
        return out

    def _fill_embeds(self, starts: I32) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.bool_] | None]:
        """The embedded tokens of the step; None and None where there are none."""
        plan, memory = self.plan, self._memory
        if not self.embeds:
            return None, None
        places = np.flatnonzero(plan.num_computed < self.columns["num_embedded"][plan.slots]).tolist()
        if not places:
            return None, None
        num_tokens, width = int(starts[-1]), next(iter(self.embeds.values())).shape[1]
        if memory.embeds.shape[1] != width:
            memory.embeds = np.zeros((self.max_num_batched_tokens, width), np.float32)
        embeds, is_embedded = memory.embeds[:num_tokens], memory.is_embedded[:num_tokens]
        embeds[:], is_embedded[:] = 0, False
        for place in places:
            first, start = int(plan.num_computed[place]), int(starts[place])
            rows = self.embeds[int(plan.slots[place])][first : first + int(plan.num_new[place])]
            embeds[start : start + len(rows)], is_embedded[start : start + len(rows)] = rows, True
        return embeds, is_embedded

    def _owners_of(self, slots: I64) -> tuple[Slot, ...]:
        """The owners of these slots; built when they are not those of the last step."""
        if self._owners is None or not np.array_equal(self._owners[0], slots):
            owners: Any = tuple(map(self._slots.__getitem__, slots.tolist()))
            self._owners = slots, owners
        return self._owners[1]

    def _step(self, starts: I32) -> tuple[Step, I64]:
        """The rows that are sampled, and the tokens that they belong to."""
        plan = self.plan
        places = np.flatnonzero(plan.sampled)
        slots = plan.slots[places]
        last = starts[1:][places] - np.int64(1)
        owners = self._owners_of(slots)
        positions = plan.num_computed[places] + plan.num_new[places]
        row_starts, draft_of_row = np.arange(len(places) + 1, dtype=np.int32), np.full(len(places), NO_DRAFT, np.int32)
        if plan.draft_ids:
            num_drafts = np.zeros(len(plan.slots), np.int64)
            num_drafts[list(plan.draft_ids)] = [len(ids) for ids in plan.draft_ids.values()]
            num_rows = num_drafts[places] + 1
            np.cumsum(num_rows, out=row_starts[1:])
            seq = np.repeat(np.arange(len(places)), num_rows)
            before_last = row_starts[1:][seq] - 1 - np.arange(len(seq))  # rows of the same sequence that follow
            slots, last, positions = slots[seq], last[seq] - before_last, positions[seq] - before_last
            draft = num_drafts[places][seq] - before_last
            draft_of_row = np.where(before_last == 0, NO_DRAFT, draft).astype(np.int32)
        at = slots.astype(np.int32), positions.astype(np.uint32), self.columns["child"][slots]
        return Step(owners, *at, draft_of_row, row_starts), last
