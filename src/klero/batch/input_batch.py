"""InputBatch: the arrays of a step, allocated once for the widest step and filled, not built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from klero.batch.blocks import Blocks
from klero.batch.history import History
from klero.batch.step import I32, StepArrays

NO_ROWS = np.iinfo(np.int32).max


class Scheduled(NamedTuple):
    """What a step does for one sequence: slot index, tokens computed before it, tokens it computes, whether it samples.

    A sequence is sampled when its step reaches the end of its history; a prefill chunk before the end is not.
    logits_from: the tokens at this position and later give a row each, to be scored; the sampled one has its own row
    already. NO_ROWS: none.
    """

    slot: int
    num_computed: int
    num_new: int
    samples: bool
    logits_from: int = NO_ROWS

    @property
    def scored(self) -> range:
        """The positions whose rows are scored."""
        end = self.num_computed + self.num_new - self.samples
        return range(min(max(self.num_computed, self.logits_from), end), end)


class InputBatch:
    """Turns scheduled sequences into `StepArrays`. Reads history and block tables by slot; owns only its arrays."""

    def __init__(self, max_seqs: int, max_tokens: int, history: History, blocks: Blocks | None) -> None:
        self._history, self._blocks = history, blocks
        self._tokens = np.zeros((2, max_tokens), np.int32)  # input_ids, positions
        self._mapping = np.zeros(max_tokens, np.int64)
        self._starts = np.zeros(max_seqs + 1, np.int32)
        width = 0 if blocks is None else blocks.tables.shape[1]
        self._tables = np.zeros((max_seqs, width), np.int32)

    def fill(self, scheduled: Sequence[Scheduled]) -> StepArrays:
        """Fill the arrays of a step; views of the same memory each time."""
        slots, computed, new, samples, logits_from = np.array(scheduled, np.int32).reshape(-1, 5).T
        num_seqs, num_tokens = len(slots), int(new.sum())
        starts = self._starts[: num_seqs + 1]
        np.cumsum(new, out=starts[1:])
        seq = np.repeat(np.arange(num_seqs), new)  # the sequence of each token
        input_ids, positions = self._tokens[:, :num_tokens]
        np.add((computed - starts[:-1])[seq], np.arange(num_tokens, dtype=np.int32), out=positions)
        input_ids[:] = self._history.ids[slots[seq], positions]
        mapping = self._mapping[:num_tokens]
        tables = self._tables[:num_seqs]
        if self._blocks is not None:
            tables = tables[:, : self._blocks.counts[slots].max(initial=0)]
            tables[:] = self._blocks.tables[slots, : tables.shape[1]]
            self._map(slots[seq], positions, mapping)
        sampled = starts[1:][samples > 0] - np.int64(1)
        rows = sampled
        if (logits_from != NO_ROWS).any():
            scored = positions >= logits_from[seq]
            scored[sampled] = False
            rows = np.concatenate([sampled, np.flatnonzero(scored)])
        return StepArrays(
            input_ids, positions, mapping, starts, computed + new, tables, slots, rows, num_sampled=len(sampled)
        )

    def _map(self, slot_of_token: I32, positions: I32, out: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Where each token's K/V goes: block * block_size + offset."""
        assert self._blocks is not None
        size = self._blocks.block_size
        np.multiply(self._blocks.tables[slot_of_token, positions // size], np.int64(size), out=out)
        out += positions % size
