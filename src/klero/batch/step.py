"""Step and StepArrays: one step as rows (for the sampler) and as packed tokens (for the model)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from klero.batch.slots import Slot

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Step:
    """The translator between rows and slots, built once a step. R rows, N sequences that are sampled.

    slots: the N owners, with their turns, so that a step built for one owner is refused by the next. slot_of_row: int32
    [R]. position_of_row: uint32 [R], the absolute index of the token that the row produces. child_of_row: uint32 [R].
    draft_of_row: int32 [R], the draft that the row verifies, -1 where none. row_starts: int32 [N + 1], the rows of each
    sequence.
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
        cls, slots: Sequence[Slot], positions: npt.NDArray[np.integer], children: npt.NDArray[np.integer]
    ) -> Step:
        """A step without drafts: each sequence has one row."""
        return cls(
            slots=tuple(slots),
            slot_of_row=np.array([slot.index for slot in slots], np.int32),
            position_of_row=np.ascontiguousarray(positions, np.uint32),
            child_of_row=np.ascontiguousarray(children, np.uint32),
            draft_of_row=np.full(len(slots), -1, np.int32),
            row_starts=np.arange(len(slots) + 1, dtype=np.int32),
        )


@dataclass(frozen=True)
class StepArrays:
    """What a model gets for one step: T tokens of N sequences, packed one sequence after the other; R rows are wanted.

    input_ids, positions: int32 [T]. slot_mapping: int64 [T], where a token's K/V goes: block * block_size + offset.
    query_starts: int32 [N + 1], the tokens of each sequence. seq_lens: int32 [N], its tokens once this step is done.
    block_tables: int32 [N, blocks of the longest], unused places 0. slots: int32 [N]. logits_rows: int64 [R], indexes
    into T, no index twice: the num_sampled rows that are sampled, sequence by sequence, then those that are scored,
    ascending. A decode has one token here, a prefill chunk more; both kinds mix in any order. Views that are valid
    until the next step is filled.
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
