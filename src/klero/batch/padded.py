"""Padded steps: a step laid out in static shapes, for whatever is compiled or recorded once per shape.

Padding comes last in every array, and belongs to nobody: its tokens are written to no sequence's blocks (slot_mapping
-1), no sequence has them as queries, and its rows are read by nobody. A model writes what has slot_mapping -1 to a
scratch block of its own, or nowhere.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.batch.step import StepArrays
from klero.errors import OptionError


@dataclass(frozen=True)
class Buckets:
    """The sizes that steps are padded to, ascending: of tokens; of rows, which sequences are padded to as well."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "rows"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
                raise OptionError(f"Buckets.{name}={sizes!r}: must be ascending sizes >= 1, at least one")

    @classmethod
    def doubling(cls, max_tokens: int, max_rows: int) -> Buckets:
        """Powers of two, and the largest size itself last."""
        return cls(*((*(2**k for k in range(64) if 2**k < most), most) for most in (max_tokens, max_rows)))

    def fit(self, num_tokens: int, num_seqs: int, num_rows: int) -> tuple[int, int, int]:
        """Return the shape that a step of these sizes is padded to; OptionError if it is larger than every bucket."""
        asked = (("tokens", num_tokens, self.tokens), ("sequences", num_seqs, self.rows), ("rows", num_rows, self.rows))
        for name, size, sizes in asked:
            if size > sizes[-1]:
                raise OptionError(
                    f"a step of {size} {name}: the largest bucket has {sizes[-1]}; make larger ones, split the step "
                    "into microbatches, or run it as it is"
                )
        num_tokens, num_seqs, num_rows = (sizes[bisect.bisect_left(sizes, size)] for _, size, sizes in asked)
        return num_tokens, num_seqs, num_rows


@dataclass(frozen=True)
class PaddedStep:
    """A step in static shapes. num_tokens, num_seqs, num_rows: how much of it is no padding.

    arrays: T', N' and R' as the buckets say, the table as wide as the scratch memory's. Padding tokens have input_ids
    and positions 0 and slot_mapping -1. Padding sequences have no tokens (query_starts repeat the end), seq_lens and
    num_computed 0, tables of 0 and slots -1. Padding rows are those of a padding token where there is one, else of
    token 0; they come behind the scored ones, and num_sampled stays. Views that are valid until the next step is padded
    in the same memory.
    """

    arrays: StepArrays
    num_tokens: int
    num_seqs: int
    num_rows: int


class Scratch:
    """The memory that padded steps are laid out in, made once for the largest bucket; always the same addresses.

    table_width: blocks of the longest sequence that there may be.
    """

    def __init__(self, buckets: Buckets, table_width: int) -> None:
        num_tokens, num_rows = buckets.tokens[-1], buckets.rows[-1]
        self.input_ids, self.positions = np.zeros((2, num_tokens), np.int32)
        self.slot_mapping = np.zeros(num_tokens, np.int64)
        self.query_starts = np.zeros(num_rows + 1, np.int32)
        self.seq_lens, self.num_computed, self.slots = np.zeros((3, num_rows), np.int32)
        self.block_tables = np.zeros((num_rows, table_width), np.int32)
        self.logits_rows = np.zeros(num_rows, np.int64)


def pad(step: StepArrays, buckets: Buckets, *, scratch: Scratch) -> PaddedStep:
    """Lay a step out in the smallest buckets that hold it.

    scratch: made for these buckets. Embeddings, where the step has some, are copied into memory of their own.
    OptionError for a step that is larger than every bucket, or whose block table is wider than the scratch memory's.
    """
    num_tokens, num_seqs, num_rows = len(step.input_ids), len(step.slots), len(step.logits_rows)
    all_tokens, all_seqs, all_rows = buckets.fit(num_tokens, num_seqs, num_rows)
    width, table_width = step.block_tables.shape[1], scratch.block_tables.shape[1]
    if width > table_width:
        raise OptionError(f"a block table of {width} blocks: the scratch memory was made for {table_width}")
    tables = scratch.block_tables[:all_seqs]
    tables[:num_seqs, :width] = step.block_tables
    tables[:num_seqs, width:], tables[num_seqs:] = 0, 0
    num_computed = step.seq_lens - np.diff(step.query_starts)
    row_of_padding = num_tokens if num_tokens < all_tokens else 0
    arrays = StepArrays(
        input_ids=_filled(scratch.input_ids, step.input_ids, all_tokens, 0),
        positions=_filled(scratch.positions, step.positions, all_tokens, 0),
        slot_mapping=_filled(scratch.slot_mapping, step.slot_mapping, all_tokens, -1),
        query_starts=_filled(scratch.query_starts, step.query_starts, all_seqs + 1, num_tokens),
        seq_lens=_filled(scratch.seq_lens, step.seq_lens, all_seqs, 0),
        block_tables=tables,
        slots=_filled(scratch.slots, step.slots, all_seqs, -1),
        logits_rows=_filled(scratch.logits_rows, step.logits_rows, all_rows, row_of_padding),
        num_sampled=step.num_sampled,
        num_computed=_filled(scratch.num_computed, num_computed, all_seqs, 0),
        inputs_embeds=_longer(step.inputs_embeds, all_tokens),
        is_embedded=_longer(step.is_embedded, all_tokens),
    )
    return PaddedStep(arrays, num_tokens, num_seqs, num_rows)


def _filled(memory: npt.NDArray[Any], values: npt.NDArray[Any], length: int, padding: int) -> npt.NDArray[Any]:
    """Write values and their padding to the front of some memory; the first `length` of it."""
    memory[: len(values)] = values
    memory[len(values) : length] = padding
    return memory[:length]


def _longer(values: npt.NDArray[Any] | None, length: int) -> npt.NDArray[Any] | None:
    """The same with rows of 0 (or False) behind."""
    if values is None:
        return None
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)])
