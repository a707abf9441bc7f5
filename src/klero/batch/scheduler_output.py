"""SchedulerOutput: the record between a scheduler and the batch, what one step changes and what it computes.

The scheduler owns the accounting of blocks; the batch owns slots, block tables, counters and arrays. The record names
what changed since the step before and nothing else, so that any scheduler can drive the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch.seats import Seat

SequenceId = tuple[str, int]
"""(request_id, child): every child of a request is a sequence of its own."""


class BlockMoves(NamedTuple):
    """What the model must do to its K/V blocks before the forward, in this order: swap_out, copy, swap_in, zero.

    swap_out: (device, host) pairs. copy: (from, to) pairs. swap_in: (host, device) pairs. zero: device blocks.
    """

    swap_out: tuple[tuple[int, int], ...] = ()
    copy: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    zero: tuple[int, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is something to do."""
        return bool(self.swap_out or self.copy or self.swap_in or self.zero)


NOTHING_MOVES = BlockMoves()


@dataclass(frozen=True, eq=False, slots=True)
class NewSequence:
    """A sequence that enters the batch.

    seat: parameters, seed and tokens. block_ids: its blocks, in order. num_computed: its first tokens whose K/V is in
    those blocks already. samples: False for one that is only scored; no row of it is ever sampled. prompt_embeds:
    float32 [E, H], the positions 0 .. E - 1; the prompt's ids follow, and E is seat.num_embedded. lora, multimodal,
    pooling: carried, never looked into. Two records are equal if they are the same object.
    """

    request_id: str
    seat: Seat
    block_ids: tuple[int, ...] = ()
    num_computed: int = 0
    samples: bool = True
    prompt_embeds: npt.NDArray[np.float32] | None = None
    lora: Any = None
    multimodal: Any = None
    pooling: Any = None

    @property
    def id(self) -> SequenceId:
        """The name of the sequence in every later record."""
        return (self.request_id, self.seat.child)


class ChangedSequence(NamedTuple):
    """What is new about a sequence of the batch; a sequence of which nothing is new is not sent.

    new_block_ids: blocks behind those it has. resumed: they replace its block table instead; for a sequence that was
    preempted, and where a shared block was replaced by a copy. num_computed: tokens whose K/V is in its blocks; None:
    where the last step ended. new_token_ids: tokens that were sampled elsewhere. draft_ids: tokens that this step
    verifies, and this step alone.
    """

    id: SequenceId
    new_block_ids: tuple[int, ...] = ()
    num_computed: int | None = None
    new_token_ids: tuple[int, ...] = ()
    draft_ids: tuple[int, ...] = ()
    resumed: bool = False


@dataclass(frozen=True)
class SchedulerOutput:
    """One step, as a scheduler decided it.

    num_tokens: what the step computes, by sequence and in the order of the step, drafts included. new, changed: see
    there. finished: sequences that leave. preempted: they keep slot and tokens, and lose blocks and computed tokens.
    moves: for the model, before the forward. free_encoder_entries: for the model, carried. scored_from: tokens of the
    step at this position and later give a row each that is scored; a row that is sampled stands once.
    """

    num_tokens: Mapping[SequenceId, int] = field(default_factory=dict)
    new: tuple[NewSequence, ...] = ()
    changed: tuple[ChangedSequence, ...] = ()
    finished: tuple[SequenceId, ...] = ()
    preempted: tuple[SequenceId, ...] = ()
    moves: BlockMoves = NOTHING_MOVES
    free_encoder_entries: tuple[Any, ...] = ()
    scored_from: Mapping[SequenceId, int] = field(default_factory=dict)
