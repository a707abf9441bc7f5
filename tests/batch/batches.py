"""Small batches for tests: sequences that enter, and everything a batch holds as plain values."""

from __future__ import annotations

import copy
from dataclasses import fields

import numpy as np

from klero import SamplingParams
from klero.batch.input_batch import InputBatch
from klero.batch.scheduler_output import NewSequence
from klero.batch.seats import Seat, Seats

PARAMS = SamplingParams(temperature=1.0)
A, B, C = ("a", 0), ("b", 0), ("c", 0)


def new(name, prompt, blocks=(), *, child=0, embeds=None, **more):
    """A sequence that enters."""
    num_embedded = 0 if embeds is None else len(embeds)
    seat = Seat(f"{name}[{child}]", PARAMS, prompt, seed=1, child=child, num_embedded=num_embedded)
    return NewSequence(name, seat, blocks, prompt_embeds=embeds, **more)


def batch_of(block_size=2, *, max_len=12, max_num_seqs=3, max_num_batched_tokens=32, seats=None):
    return InputBatch(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_len=max_len,
        block_size=block_size, seats=seats or Seats(max_num_seqs, max_len, vocab_size=100),
    )  # fmt: skip


def lists(record):
    """The fields of StepArrays or Step as plain values."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


def append(batch, **token_of):
    """What a sampler does with the tokens it draws."""
    slots = [batch.index_of[name, 0] for name in token_of]
    batch.seats.append(np.array(slots, np.int32), np.array(list(token_of.values()), np.int32))


def everything(batch):
    """All that a batch and its seats hold, as values to be compared."""
    seats, history = batch.seats, batch.seats.history
    return copy.deepcopy(
        [
            {name: batch.columns[name].tolist() for name in batch.columns._declared},
            batch.index_of, {i: e.tolist() for i, e in batch.embeds.items()}, batch._slots,
            [sequence and sequence.id for sequence in batch._sequences],
            [part.tolist() if isinstance(part, np.ndarray) else part for part in batch.plan],
            history.ids.tolist(), history.lengths.tolist(), history.prompt_lengths.tolist(),
            seats.slots._free, seats.slots._turn, seats.slots._owner,
            [lists(part) for part in batch.fill()],
        ]
    )  # fmt: skip
