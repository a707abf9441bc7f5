"""Blocks: which paged KV blocks a slot holds. Accounting only; the memory belongs to the model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from klero.errors import BlockError


class Blocks:
    """A free list of KV blocks and the block table of every slot.

    tables: int32 [S, max_blocks], unused places 0; counts: int32 [S], blocks each slot holds.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, max_len: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise BlockError(f"num_blocks={num_blocks}, block_size={block_size}: both must be >= 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables = np.zeros((num_slots, -(-max_len // block_size)), np.int32)
        self.counts = np.zeros(num_slots, np.int32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # a stack; its top is num_free - 1
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    def missing(self, index: int, num_tokens: int) -> int:
        """Blocks a slot still needs before it can hold num_tokens."""
        return max(0, -(-num_tokens // self.block_size) - int(self.counts[index]))

    def grow(self, index: int, num_tokens: int) -> bool:
        """Give a slot the blocks for num_tokens; False, and nothing changed, when there are not enough."""
        needed = self.missing(index, num_tokens)
        if needed > self._num_free:
            return False
        count = int(self.counts[index])
        if count + needed > self.tables.shape[1]:
            longest = self.tables.shape[1] * self.block_size
            raise BlockError(f"slot {index}: {num_tokens} tokens are more than a block table holds ({longest})")
        taken = self._free[self._num_free - needed : self._num_free][::-1]
        self.tables[index, count : count + needed] = taken
        self.counts[index] += needed
        self._num_free -= needed
        return True

    def release(self, index: int) -> int:
        """Take all blocks back from a slot and clear its table; return how many there were."""
        count = int(self.counts[index])
        if self._num_free + count > self.num_blocks:
            out = self.num_blocks - self._num_free
            raise BlockError(f"slot {index}: {count} blocks come back, but only {out} are out")
        self._free[self._num_free : self._num_free + count] = self.tables[index, :count][::-1]
        self._num_free += count
        self.tables[index, :count] = 0
        self.counts[index] = 0
        return count

    def keep(self, indices: Iterable[int]) -> None:
        """Take the blocks of every slot but these, whatever was cut short before."""
        kept = list(indices)
        gone = np.ones(len(self.counts), bool)
        gone[kept] = False
        self.tables[gone], self.counts[gone] = 0, 0
        held = {int(block) for index in kept for block in self.held(index)}
        free = [block for block in range(self.num_blocks) if block not in held]
        self._free[: len(free)], self._num_free = free[::-1], len(free)

    def held(self, index: int) -> npt.NDArray[np.int32]:
        """The blocks of a slot, in order; a copy."""
        return self.tables[index, : self.counts[index]].copy()
