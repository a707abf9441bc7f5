"""Counts: which ids occurred in the history of each slot, and how often; never a [S, V] table.

An id that occurred is an entry, in the order of first occurrence; entries are found through open addressing, whose part
in use doubles as they come, so that the memory that is touched grows with the tokens. Appending is the only way in; a
rewind takes the last tokens back, the newest first, and leaves what was there before them. Agreement of the kernels
with reference.py: the same ids, in the same order, with the same counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.batch.zeros import sparse_zeros
from klero.errors import SlotError

IDS = npt.NDArray[np.integer]
FIRST_LOG2 = 4


class Counts:
    """Entries of S slots whose histories hold at most max_len tokens. Any int32 is an id, within a vocabulary or not.

    Arrays, for kernels, made when the first slot needs them. ids, counts: int32 [S, max_len], the first num_entries[s]
    are valid; a count is the number of occurrences that count, so an id of a prompt that does not count has 0. index:
    int32 [S, C], 0 empty, else entry + 1; its first 1 << log2_used[s] places are in use, at most half of them filled.
    What is not valid or not in use may hold anything; nothing reads it.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self._max_len = max_len
        self.num_entries = np.zeros(num_slots, np.int32)
        self.log2_used = np.full(num_slots, FIRST_LOG2, np.int32)
        self._num_prompt = np.zeros(num_slots, np.int32)  # entries that the prompt brought: they never leave
        self._make(0)

    def start(self, index: int, prompt_ids: npt.ArrayLike, output_ids: npt.ArrayLike, counted_from: int) -> None:
        """Take the history of a slot, in place of what it held. Prompt tokens from `counted_from` on count, and all
        output."""
        from klero.batch.counts.cpu import add_tokens

        if not self.ids.shape[1]:
            self._make(self._max_len)
        self.reset(index)
        add_tokens(*self._arrays(), index, np.asarray(prompt_ids, np.int32), counted_from)
        self._num_prompt[index] = self.num_entries[index]
        add_tokens(*self._arrays(), index, np.asarray(output_ids, np.int32), 0)

    def append(self, indices: IDS, token_ids: IDS) -> None:
        """Count one token in each slot of `indices` (no slot twice)."""
        from klero.batch.counts.cpu import append_tokens

        append_tokens(*self._arrays(), np.asarray(indices, np.int64), np.asarray(token_ids, np.int32))

    def rewind(self, index: int, removed_ids: npt.ArrayLike) -> None:
        """Take the last output tokens of a slot back. removed_ids: these tokens, in the order in which they came.

        Raises SlotError at one that does not count; those after it are taken back by then.
        """
        from klero.batch.counts.cpu import remove_tokens

        removed = np.asarray(removed_ids, np.int32)
        wrong = remove_tokens(*self._arrays(), index, removed, self._num_prompt[index])
        if wrong >= 0:
            raise SlotError(f"slot {index}: token {removed[wrong]} does not count; give the last output tokens only")

    def reset(self, index: int) -> None:
        """Empty a slot."""
        self.index[index, : 1 << FIRST_LOG2] = 0  # growing clears the places that it adds
        self.num_entries[index] = self._num_prompt[index] = 0
        self.log2_used[index] = FIRST_LOG2

    def of(self, index: int) -> dict[int, int]:
        """The counts of a slot by id, in the order of first occurrence."""
        n = self.num_entries[index]
        return dict(zip(self.ids[index, :n].tolist(), self.counts[index, :n].tolist(), strict=True))

    def _make(self, max_len: int) -> None:
        num_slots = len(self.num_entries)
        places = 1 << max(FIRST_LOG2, (2 * max_len - 1).bit_length()) if max_len else 0
        self.ids = sparse_zeros((num_slots, max_len), np.int32)
        self.counts = sparse_zeros((num_slots, max_len), np.int32)
        self.index = sparse_zeros((num_slots, places), np.int32)

    def _arrays(self) -> tuple[IDS, IDS, IDS, IDS, IDS]:
        """What every kernel takes first."""
        return self.ids, self.counts, self.num_entries, self.index, self.log2_used
