"""N-grams: which tokens followed the last n - 1 tokens of a slot's history before, without reading the history again.

Position p belongs to the n - 1 tokens before it. Positions of the same tokens form a chain, the newest first:
`previous[p]` leads to the one before p, and open addressing from the tokens to the newest. A position is added when its
token is appended, and taken back by a rewind, the newest first. Agreement of the kernels with reference.py: *set*.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.batch.zeros import sparse_zeros

IDS = npt.NDArray[np.integer]
FIRST_LOG2 = 4


class Ngrams:
    """The n-grams of S slots whose histories hold at most max_len tokens; the tokens themselves stay in the history.

    Arrays, for kernels, made when the first slot needs them. index: int32 [S, C], 0 empty, else the newest position of
    some n - 1 tokens, plus 1; its first 1 << log2_used[s] places are in use, num_used[s] of them are filled, at most
    half. previous: int32 [S, max_len], the next older position of the chain, plus 1, or 0; valid at the positions that
    were added. sizes: int32 [S], n. What is not valid or not in use may hold anything; nothing reads it.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self._max_len = max_len
        self.sizes = np.zeros(num_slots, np.int32)
        self.num_used = np.zeros(num_slots, np.int32)
        self.log2_used = np.full(num_slots, FIRST_LOG2, np.int32)
        self._make(0)

    def start(self, index: int, size: int, history: npt.NDArray[np.int32], length: int) -> None:
        """Take the history of a slot, in place of what it held. size: n, in [1, max_len + 1]; the last of these, like
        every n beyond, has no n-gram. history: int32 [L], its first `length` are valid.
        """
        from klero.batch.ngrams.cpu import add_positions

        if not self.previous.shape[1]:
            self._make(self._max_len)
        self.reset(index)
        self.sizes[index] = size
        add_positions(*self._of(index), history, size, 0, length)

    def append(self, indices: IDS, history: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
        """Take the newest token of each slot of `indices`; history [S, L] and lengths [S] have it already."""
        from klero.batch.ngrams.cpu import append_positions

        arrays = self.index, self.num_used, self.log2_used, self.previous
        append_positions(*arrays, history, self.sizes, lengths, np.asarray(indices, np.int64))

    def rewind(self, index: int, history: npt.NDArray[np.int32], length: int, shorter: int) -> None:
        """Take back the positions shorter .. length - 1. history: int32 [L] of the slot, still with these tokens."""
        from klero.batch.ngrams.cpu import remove_positions

        remove_positions(*self._of(index), history, self.sizes[index], length, shorter)

    def reset(self, index: int) -> None:
        """Empty a slot."""
        self.index[index, : 1 << FIRST_LOG2] = 0  # growing clears the places that it adds
        self.sizes[index] = self.num_used[index] = 0
        self.log2_used[index] = FIRST_LOG2

    def followers(self, index: int, history: npt.NDArray[np.int32], length: int) -> set[int]:
        """The tokens that followed the last n - 1 tokens of a slot before."""
        from klero.batch.ngrams.cpu import newest

        found: set[int] = set()
        position = newest(history, length, self.sizes[index], self.index[index], self.log2_used[index])
        while position >= 0:
            found.add(int(history[position]))
            position = int(self.previous[index, position]) - 1
        return found

    def _make(self, max_len: int) -> None:
        num_slots = len(self.sizes)
        places = 1 << max(FIRST_LOG2, (2 * max_len - 1).bit_length()) if max_len else 0
        self.index = sparse_zeros((num_slots, places), np.int32)
        self.previous = sparse_zeros((num_slots, max_len), np.int32)

    def _of(self, index: int) -> tuple[IDS, IDS, IDS, IDS]:
        """The arrays of one slot, as the kernels want them."""
        here = slice(index, index + 1)
        return self.index[index], self.num_used[here], self.log2_used[here], self.previous[index]
