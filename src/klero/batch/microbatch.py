"""Microbatches: a step computed in parts, each within limits, and the logits put together again.

The parts run one after the other, in order. What a token reads was written by steps before, or by a part up to its own,
as long as every sequence reads blocks that it wrote itself or that were complete before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from klero.batch.step import I32, I64, StepArrays
from klero.errors import LogitsError, OptionError


@dataclass(frozen=True)
class Microbatch:
    """A part of a step. arrays: a step of its own, by every rule of `StepArrays`, block tables as wide as the whole's.

    rows: int64 [r], which rows of the whole step its logits are.
    """

    arrays: StepArrays
    rows: I64


class Piece(NamedTuple):
    """Tokens begin .. end - 1 of the step, all of sequence n."""

    n: int
    begin: int
    end: int


def split(
    step: StepArrays,
    *,
    max_tokens: int | None = None,
    max_requests: int | None = None,
    apart: bool = False,
    by_length: bool = False,
) -> list[Microbatch]:
    """Split a step into microbatches of at most max_tokens tokens and max_requests sequences; None: no limit.

    Sequences fill one microbatch after the other, in their order. One with more than max_tokens tokens is cut: its
    parts lie in different microbatches, in order, and the first takes what room is left; no other is cut. apart:
    decodes first, and no microbatch has both kinds; a decode is a sequence that samples a row of each of its tokens,
    everything else is a prefill. by_length: sequences by `seq_lens`, ascending, the step's order on ties; of each kind
    where they are apart. A step that is within the limits, and of one kind where that is asked, is returned as it is.
    OptionError for a limit below 1.
    """
    for name, limit in (("max_tokens", max_tokens), ("max_requests", max_requests)):
        if limit is not None and limit < 1:
            raise OptionError(f"{name}={limit}: must be >= 1, or None for no limit")
    num_tokens, num_seqs = len(step.input_ids), len(step.slots)
    room = max_tokens or max(1, num_tokens), max_requests or max(1, num_seqs)
    kinds = [kind for kind in (_kinds(step) if apart else [np.arange(num_seqs)]) if len(kind)]
    if len(kinds) <= 1 and num_tokens <= room[0] and num_seqs <= room[1]:
        return [Microbatch(step, np.arange(len(step.logits_rows)))]
    if by_length:
        kinds = [kind[np.argsort(step.seq_lens[kind], kind="stable")] for kind in kinds]
    row_of_token = np.full(num_tokens, -1, np.int64)
    row_of_token[step.logits_rows] = np.arange(len(step.logits_rows))
    return [
        _part(step, row_of_token, pieces) for kind in kinds for pieces in _fill(kind.tolist(), step.query_starts, *room)
    ]


def _kinds(step: StepArrays) -> list[I64]:
    """The sequences that decode, and those that prefill."""
    num_tokens = np.diff(step.query_starts)
    sequence_of_token = np.repeat(np.arange(len(num_tokens)), num_tokens)
    sampled = sequence_of_token[step.logits_rows[: step.num_sampled]]
    decodes = np.bincount(sampled, minlength=len(num_tokens)) == num_tokens
    return [np.flatnonzero(decodes), np.flatnonzero(~decodes)]


def _fill(order: Iterable[int], query_starts: I32, max_tokens: int, max_requests: int) -> list[list[Piece]]:
    """Fill one microbatch after the other."""
    starts = query_starts.tolist()
    filled: list[list[Piece]] = [[]]
    room = max_tokens
    for n in order:
        begin, end = starts[n], starts[n + 1]
        if len(filled[-1]) == max_requests or room < end - begin <= max_tokens:
            filled.append([])
            room = max_tokens
        while begin < end:
            if room == 0:
                filled.append([])
                room = max_tokens
            stop = min(end, begin + room)
            filled[-1].append(Piece(n, begin, stop))
            room -= stop - begin
            begin = stop
    return filled


def _part(step: StepArrays, row_of_token: I64, pieces: Sequence[Piece]) -> Microbatch:
    """Lay pieces out as a step of their own."""
    seqs, begins, ends = np.array(pieces, np.int64).T
    starts = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(ends - begins, out=starts[1:])
    tokens = np.repeat(begins - starts[:-1], ends - begins) + np.arange(starts[-1])
    rows = row_of_token[tokens]
    sampled = np.flatnonzero((rows >= 0) & (rows < step.num_sampled))
    wanted = np.concatenate([sampled, np.flatnonzero(rows >= step.num_sampled)])
    seq_lens = step.seq_lens[seqs] - (step.query_starts[seqs + 1] - ends).astype(np.int32)
    embedded = None if step.is_embedded is None else step.is_embedded[tokens]
    if embedded is not None and not embedded.any():
        embedded = None
    arrays = StepArrays(
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        slot_mapping=step.slot_mapping[tokens],
        query_starts=starts,
        seq_lens=seq_lens,
        block_tables=step.block_tables[seqs],
        slots=step.slots[seqs],
        logits_rows=wanted,
        num_sampled=len(sampled),
        num_computed=seq_lens - np.diff(starts),
        inputs_embeds=None if embedded is None or step.inputs_embeds is None else step.inputs_embeds[tokens],
        is_embedded=embedded,
    )
    return Microbatch(arrays, rows[wanted])


def merge(parts: Sequence[Any], microbatches: Sequence[Microbatch]) -> Any:
    """Return the logits [R, V] of the step, in its order, of those of its microbatches; NumPy or torch, as they came.

    parts: the logits [r, V] of each microbatch, in order. A step of one microbatch that kept its order is not copied.
    LogitsError for a part with another number of rows.
    """
    for number, (part, microbatch) in enumerate(zip(parts, microbatches, strict=True)):
        if part.shape[0] != len(microbatch.rows):
            raise LogitsError(f"logits of microbatch {number}: {part.shape[0]} rows for {len(microbatch.rows)}")
    num_rows = sum(len(microbatch.rows) for microbatch in microbatches)
    first = parts[0]
    if len(parts) == 1 and np.array_equal(microbatches[0].rows, np.arange(num_rows)):
        return first
    shape = (num_rows, first.shape[1])
    merged = first.new_empty(shape) if hasattr(first, "new_empty") else np.empty(shape, first.dtype)
    for part, microbatch in zip(parts, microbatches, strict=True):
        merged[microbatch.rows] = part
    return merged
