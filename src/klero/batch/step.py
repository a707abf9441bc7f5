"""Step and StepArrays: one step as rows (for the sampler) and as packed tokens (for the model)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from klero.batch.slots import Slot
from klero.errors import OptionError

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
NO_DRAFT = -1  # in draft_of_row


@dataclass(frozen=True)
class Step:
    """The translator between rows and slots, built once a step. R rows, N sequences that are sampled.

    slots: the N owners, with their turns, so that a step built for one owner is refused by the next. slot_of_row: int32
    [R]. position_of_row: uint32 [R], the absolute index of the token that the row produces. child_of_row: uint32 [R].
    draft_of_row: int32 [R], the draft that the row verifies, -1 where none: a sequence with K drafts has K + 1 rows, 0
    .. K - 1 and -1. row_starts: int32 [N + 1], the rows of each sequence.
    """

    slots: tuple[Slot, ...]
    slot_of_row: I32
    position_of_row: U32
    child_of_row: U32
    draft_of_row: I32
    row_starts: I32

    @property
    def num_rows(self) -> int:
        """Logits rows of this step."""
        return len(self.slot_of_row)

    @classmethod
    def one_row_each(
        cls,
        slots: Sequence[Slot],
        positions: npt.NDArray[np.integer],
        children: npt.NDArray[np.integer],
        indices: I32 | None = None,
    ) -> Step:
        """A step without drafts: each sequence has one row. indices: of the slots, where the caller has them."""
        return cls(
            slots=tuple(slots),
            slot_of_row=np.array([slot.index for slot in slots] if indices is None else indices, np.int32),
            position_of_row=np.ascontiguousarray(positions, np.uint32),
            child_of_row=np.ascontiguousarray(children, np.uint32),
            draft_of_row=np.full(len(slots), NO_DRAFT, np.int32),
            row_starts=np.arange(len(slots) + 1, dtype=np.int32),
        )

    def padded(self, num_rows: int, scratch_slot: int) -> Step:
        """Return the step with padding rows behind its own, num_rows in all; OptionError if it has more already.

        scratch_slot: whose columns the padding rows read, best a slot where nobody sits: its values are neutral. They
        have position 0 and child 0, and no draft. `slots` and `row_starts` stay: who goes through a step by sequence
        never meets them, and who goes by row writes nothing for rows from row_starts[-1] on.
        """
        missing = num_rows - self.num_rows
        if missing < 0:
            raise OptionError(f"num_rows={num_rows}: the step has {self.num_rows}; pad to no fewer")
        behind = (0, missing)
        return replace(
            self,
            slot_of_row=np.pad(self.slot_of_row, behind, constant_values=scratch_slot),
            position_of_row=np.pad(self.position_of_row, behind),
            child_of_row=np.pad(self.child_of_row, behind),
            draft_of_row=np.pad(self.draft_of_row, behind, constant_values=NO_DRAFT),
        )


@dataclass(frozen=True)
class StepArrays:
    """What a model gets for one step: T tokens of N sequences, packed one sequence after the other; R rows are wanted.

    input_ids, positions: int32 [T]. slot_mapping: int64 [T], where a token's K/V goes: block * block_size + offset.
    query_starts: int32 [N + 1], the tokens of each sequence. num_computed: int32 [N], its tokens before this step,
    seq_lens: int32 [N], once it is done. block_tables: int32 [N, blocks of the longest], unused places 0. slots: int32
    [N]. logits_rows: int64 [R], indexes into T, no index twice: the num_sampled rows that are sampled, sequence by
    sequence, then those that are scored, ascending. inputs_embeds: float32 [T, H] and is_embedded: bool [T], the tokens
    that come as embeddings, which have input_ids 0 (the other rows are 0); both None where no token of the step does.
    A decode has one token here, a prefill chunk more; both kinds mix in any order. Views that are valid until the next
    step is filled.
    """

    input_ids: I32
    positions: I32
    slot_mapping: I64
    query_starts: I32
    seq_lens: I32
    block_tables: I32
    slots: I32
    logits_rows: I64
    num_sampled: int
    num_computed: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    inputs_embeds: npt.NDArray[np.float32] | None = None
    is_embedded: npt.NDArray[np.bool_] | None = None
