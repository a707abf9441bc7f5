"""Toy models: no weights, the same bits for every batch, every chunking and every machine.

`ToyModel` owns its sequences; `PagedToyModel` keeps its state in the engine's blocks, so that a wrong slot mapping or
block table changes its logits. `ScriptedModel` says one token after the other, for tests about what follows a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.batch import StepArrays
from klero.finish import TokenBytes
from klero.lots.philox import philox4x32

F32 = npt.NDArray[np.float32]
MIX = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def state_after(state: int, token_id: int, position: int) -> int:
    """Fold one token and its position into a 64-bit state."""
    state = (state ^ (token_id + 1) * MIX ^ (position << 32)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ (state >> 29)


def logits_of_state(state: int, vocab_size: int, scale: float) -> F32:
    """Logits [V] that depend on every token of the sequence and nothing else."""
    counter = np.zeros((-(-vocab_size // 4), 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    words = philox4x32(counter, (state & 0xFFFFFFFF, state >> 32)).reshape(-1)[:vocab_size]
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(scale * 2.0**-24)


class ToyModel:
    """A model that owns its sequences: its state is a hash of the tokens, kept by slot.

    vocabulary: bytes of tokens, None for ids only. scale: the largest logit; the smallest is 0.
    """

    uses_blocks = False
    deterministic = True

    def __init__(
        self,
        vocab_size: int = 64,
        max_model_len: int = 256,
        end_token_ids: Sequence[int] = (),
        *,
        scale: float = 4.0,
        vocabulary: TokenBytes | None = None,
    ) -> None:
        self.vocab_size, self.max_model_len, self.scale = vocab_size, max_model_len, scale
        self.end_token_ids = tuple(end_token_ids)
        self.vocabulary = vocabulary
        self.num_forwards = 0
        self._states: dict[int, tuple[int, int]] = {}  # slot -> (tokens folded in, state)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Nothing to make room for."""

    def bytes_per_block(self, block_size: int) -> int:
        """No blocks."""
        return 0

    def release(self, slot: int) -> None:
        """Forget a sequence; the next token of this slot must be its first."""
        self._states.pop(slot, None)

    def forward(self, step: StepArrays) -> F32:
        """Fold the step's tokens into the states; one row for each of logits_rows."""
        self.num_forwards += 1
        states = np.zeros(len(step.input_ids), object)
        for n, slot in enumerate(step.slots.tolist()):
            count, state = self._states.get(slot, (0, 0))
            for t in range(step.query_starts[n], step.query_starts[n + 1]):
                if step.positions[t] != count:
                    raise AssertionError(f"slot {slot}: position {step.positions[t]} comes where {count} is due")
                count, state = count + 1, state_after(state, int(step.input_ids[t]), count)
                states[t] = state
            self._states[slot] = (count, state)
        return self.rows([int(states[t]) for t in step.logits_rows])

    def rows(self, states: Sequence[int]) -> F32:
        """One row of logits per state."""
        if not states:
            return np.zeros((0, self.vocab_size), np.float32)
        return np.stack([logits_of_state(state, self.vocab_size, self.scale) for state in states])


class PagedToyModel(ToyModel):
    """The same function of the tokens, computed from what lies in the engine's blocks (tokens instead of K and V)."""

    uses_blocks = True

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Poison the cache: reading what was never written changes the logits."""
        self._cache = np.full(num_blocks * block_size, -7, np.int64)
        self._block_size = block_size

    def bytes_per_block(self, block_size: int) -> int:
        """One 64-bit word per token."""
        return 8 * block_size

    def forward(self, step: StepArrays) -> F32:
        """Write the step's tokens to their places, then read each sequence back through its block table."""
        self.num_forwards += 1
        self._cache[step.slot_mapping] = step.input_ids
        sequence_of_token = np.repeat(np.arange(len(step.slots)), np.diff(step.query_starts))
        states = []
        for t in step.logits_rows.tolist():
            state, table = 0, step.block_tables[sequence_of_token[t]]
            for position in range(int(step.positions[t]) + 1):
                place = table[position // self._block_size] * self._block_size + position % self._block_size
                state = state_after(state, int(self._cache[place]), position)
            states.append(state)
        return self.rows(states)


class ScriptedModel(ToyModel):
    """Says script[k] as the k-th token after the prompt, whatever was said; past its end the last one again.

    prompt_len: length of every prompt. strength: the logit of the scripted token; all others are 0.
    """

    def __init__(self, script: Sequence[int], prompt_len: int = 1, *, strength: float = 50.0, **options: Any) -> None:
        super().__init__(**options)
        self.script, self.prompt_len, self.strength = list(script), prompt_len, strength

    def forward(self, step: StepArrays) -> F32:
        """The scripted row for each position."""
        self.num_forwards += 1
        rows = np.zeros((len(step.logits_rows), self.vocab_size), np.float32)
        for row, t in zip(rows, step.logits_rows.tolist(), strict=True):
            k = min(max(int(step.positions[t]) + 1 - self.prompt_len, 0), len(self.script) - 1)
            row[self.script[k]] = self.strength
        return rows
