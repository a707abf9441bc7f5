"""Toy models: no weights, the same bits for every batch, every chunking and every machine.

`ToyModel` owns its sequences; `PagedToyModel` keeps its state in the engine's blocks, so that a wrong slot mapping or
block table changes its logits. `ScriptedModel` says one token after the other, for tests about what follows a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.batch import StepArrays
from klero.batch.scheduler_output import BlockMoves
from klero.finish import TokenBytes
from klero.lots.philox import philox4x32

F32 = npt.NDArray[np.float32]
MIX = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
MASK32 = np.uint64(2**32 - 1)


def state_after(state: int, token_id: int, position: int) -> int:
    """Fold one token and its position into a 64-bit state."""
    state = (state ^ (token_id + 1) * MIX ^ (position << 32)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ (state >> 29)


def logits_of_state(state: int, vocab_size: int, scale: float) -> F32:
    """Logits [V] that depend on every token of the sequence and nothing else."""
    row: F32 = logits_of_states([state], vocab_size, scale)[0]
    return row


def logits_of_states(states: Sequence[int], vocab_size: int, scale: float) -> F32:
    """The same of several sequences at once: [R, V]."""
    counter = np.zeros((-(-vocab_size // 4), 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    keys: Any = np.array(states, np.uint64)[:, None]
    words = philox4x32(counter, (keys & MASK32, keys >> np.uint64(32))).reshape(len(states), -1)[:, :vocab_size]
    logits: F32 = (words >> np.uint32(8)).astype(np.float32) * np.float32(scale * 2.0**-24)
    return logits


def token_of_embedding(row: F32) -> int:
    """The token that an embedding stands for: a hash of its bytes, in [0, 2^56); no id, unless by chance."""
    return int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=7).digest(), "little")


def tokens_of(step: StepArrays) -> npt.NDArray[np.int64]:
    """The tokens [T] of a step: its ids, and what its embeddings stand for."""
    tokens = step.input_ids.astype(np.int64)
    if step.inputs_embeds is not None and step.is_embedded is not None:
        for t in np.flatnonzero(step.is_embedded).tolist():
            tokens[t] = token_of_embedding(step.inputs_embeds[t])
    return tokens


class ToyModel:
    """A model that owns its sequences: its state is a hash of the tokens, kept by slot.

    vocabulary: bytes of tokens, None for ids only. scale: the largest logit; the smallest is 0.
    """

    uses_blocks = False
    deterministic = True
    hidden_size: int | None = 4

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
        """Fold the step's tokens into the states; one row for each of logits_rows, NaN for those of padding."""
        self.num_forwards += 1
        tokens, states = tokens_of(step), np.zeros(len(step.input_ids), object)
        for n, slot in enumerate(step.slots.tolist()):
            if slot < 0:
                continue  # padding
            count, state = self._states.get(slot, (0, 0))
            for t in range(step.query_starts[n], step.query_starts[n + 1]):
                if step.positions[t] != count:
                    raise AssertionError(f"slot {slot}: position {step.positions[t]} comes where {count} is due")
                count, state = count + 1, state_after(state, int(tokens[t]), count)
                states[t] = state
            self._states[slot] = (count, state)
        return self.rows([int(states[t]) if t < step.query_starts[-1] else None for t in step.logits_rows])

    def rows(self, states: Sequence[int | None]) -> F32:
        """One row of logits per state; NaN for None, so that nobody reads the row of a token that is nobody's."""
        logits = np.full((len(states), self.vocab_size), np.nan, np.float32)
        known = [r for r, state in enumerate(states) if state is not None]
        if known:
            logits[known] = logits_of_states([states[r] or 0 for r in known], self.vocab_size, self.scale)
        return logits


class PagedToyModel(ToyModel):
    """The same function of the tokens, computed from what lies in the engine's blocks (tokens instead of K and V)."""

    uses_blocks = True

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        """Poison the cache: reading what was never written changes the logits. Behind it lies a scratch block."""
        self._memory = np.full((num_blocks + 1) * block_size, -7, np.int64)
        self._host = np.full(num_host_blocks * block_size, -9, np.int64)
        self._block_size, self._scratch = block_size, num_blocks * block_size

    @property
    def _cache(self) -> npt.NDArray[np.int64]:
        """What lies in the blocks, without the scratch block."""
        return self._memory[: self._scratch]

    def bytes_per_block(self, block_size: int) -> int:
        """One 64-bit word per token."""
        return 8 * block_size

    def move_blocks(self, moves: BlockMoves) -> None:
        """Carry out the moves of a step, one after the other."""
        device, host = (memory.reshape(-1, self._block_size) for memory in (self._cache, self._host))
        for block, place in moves.swap_out:
            host[place] = device[block]
        for source, target in moves.copy:
            device[target] = device[source]
        for place, block in moves.swap_in:
            device[block] = host[place]
        for block in moves.zero:
            device[block] = 0

    def forward(self, step: StepArrays) -> F32:
        """Write the step's tokens to their places, then read each sequence back through its block table."""
        self.num_forwards += 1
        self._memory[np.where(step.slot_mapping < 0, self._scratch, step.slot_mapping)] = tokens_of(step)
        sequence_of_token = np.repeat(np.arange(len(step.slots)), np.diff(step.query_starts))
        states: list[int | None] = []
        for t in step.logits_rows.tolist():
            if t >= step.query_starts[-1]:
                states.append(None)
                continue
            state, table = 0, step.block_tables[sequence_of_token[t]]
            positions = np.arange(int(step.positions[t]) + 1)
            places = table[positions // self._block_size] * self._block_size + positions % self._block_size
            for position, token in enumerate(self._cache[places].tolist()):
                state = state_after(state, token, position)
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
