"""Who sits where: slots, what is known per slot, and the arrays of one step.

A slot seats one sequence and never moves; everything that outlives a step is a column indexed by slot. A row is one
logits row of one step; `Step` translates between the two.
"""

from klero.batch.blocks import Blocks
from klero.batch.columns import Column, Columns
from klero.batch.history import History
from klero.batch.input_batch import InputBatch, Scheduled
from klero.batch.slots import Slot, Slots
from klero.batch.step import Step, StepArrays

__all__ = ["Blocks", "Column", "Columns", "History", "InputBatch", "Scheduled", "Slot", "Slots", "Step", "StepArrays"]
