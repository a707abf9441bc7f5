"""History: the tokens of every sequence, prompt and output, int32 [S, max_len] with lengths."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.batch.zeros import sparse_zeros
from klero.errors import RequestError, SlotError


class History:
    """Tokens by slot. ids: int32 [S, max_len]; lengths, prompt_lengths: int32 [S]. Past a length nothing is valid."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.max_len = max_len
        self.ids = sparse_zeros((num_slots, max_len), np.int32)
        self.lengths = np.zeros(num_slots, np.int32)
        self.prompt_lengths = np.zeros(num_slots, np.int32)

    def start(self, index: int, prompt_ids: npt.ArrayLike, output_ids: npt.ArrayLike = ()) -> None:
        """Seat a prompt, and what was generated so far, in a slot. Raises RequestError when they exceed max_len."""
        prompt, output = np.asarray(prompt_ids, np.int32), np.asarray(output_ids, np.int32)
        length = len(prompt) + len(output)
        if length > self.max_len:
            raise RequestError(f"prompt and output of {length} tokens: the longest history is {self.max_len}")
        self.ids[index, : len(prompt)] = prompt
        self.ids[index, len(prompt) : length] = output
        self.lengths[index], self.prompt_lengths[index] = length, len(prompt)

    def append(self, indices: npt.NDArray[np.integer], token_ids: npt.NDArray[np.integer]) -> None:
        """Append one token to each slot of `indices` (no slot twice)."""
        places = self.lengths[indices]
        if np.count_nonzero(places >= self.max_len):
            full = int(indices[np.argmax(places)])
            raise SlotError(f"slot {full}: its history holds max_len={self.max_len} tokens already")
        self.ids[indices, places] = token_ids
        self.lengths[indices] = places + 1

    def rewind(self, index: int, length: int) -> None:
        """Forget all tokens after the first `length`; the prompt stays."""
        self.check_rewind(index, length)
        self.lengths[index] = length

    def check_rewind(self, index: int, length: int) -> None:
        """Raise SlotError for a length that a slot cannot go back to."""
        if not self.prompt_lengths[index] <= length <= self.lengths[index]:
            bounds = f"[{self.prompt_lengths[index]}, {self.lengths[index]}]"
            raise SlotError(f"slot {index}: cannot rewind to length {length}, must be in {bounds}")

    def tokens(self, index: int) -> npt.NDArray[np.int32]:
        """The tokens of a slot, prompt first; a copy."""
        return self.ids[index, : self.lengths[index]].copy()

    def reset(self, index: int) -> None:
        """Empty a slot."""
        self.lengths[index] = self.prompt_lengths[index] = 0
