"""Who sits where: slots, what is known per slot, the blocks of K/V, and the arrays of one step.

A slot seats one sequence and never moves; everything that outlives a step is a column indexed by slot. A row is one
logits row of one step; `Step` translates between the two. A scheduler says what a step does in a `SchedulerOutput`, and
`InputBatch` makes arrays of it.
"""

from klero.batch.blocks import Blocks
from klero.batch.changes import NO_ROWS
from klero.batch.columns import Column, Columns
from klero.batch.history import History
from klero.batch.input_batch import InputBatch
from klero.batch.kv import Held, KVAccount
from klero.batch.microbatch import Microbatch, merge, split
from klero.batch.padded import Buckets, PaddedStep, Scratch, pad
from klero.batch.prefix import block_keys, identity_of
from klero.batch.scheduler_output import (
    NOTHING_MOVES,
    BlockMoves,
    ChangedSequence,
    NewSequence,
    SchedulerOutput,
    SequenceId,
)
from klero.batch.seats import Seat, Seating, Seats
from klero.batch.slots import Slot, Slots
from klero.batch.step import Step, StepArrays

__all__ = [
    "NOTHING_MOVES",
    "NO_ROWS",
    "BlockMoves",
    "Blocks",
    "Buckets",
    "ChangedSequence",
    "Column",
    "Columns",
    "Held",
    "History",
    "InputBatch",
    "KVAccount",
    "Microbatch",
    "NewSequence",
    "PaddedStep",
    "SchedulerOutput",
    "Scratch",
    "Seat",
    "Seating",
    "Seats",
    "SequenceId",
    "Slot",
    "Slots",
    "Step",
    "StepArrays",
    "block_keys",
    "identity_of",
    "merge",
    "pad",
    "split",
]
