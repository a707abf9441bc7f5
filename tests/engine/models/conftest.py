"""Packed steps and tiny random models for the tests of the engine's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from klero.batch import StepArrays

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class Packer:
    """A toy scheduler: sequences join, take shuffled blocks as they grow, and leave."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.rng = np.random.default_rng(seed)
        self.free = list(self.rng.permutation(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}

    def join(self, slot: int) -> None:
        self.tables[slot], self.done[slot] = [], 0

    def leave(self, slot: int) -> None:
        self.free.extend(self.tables.pop(slot))
        self.rng.shuffle(self.free)
        del self.done[slot]

    def step(self, chunks: list[tuple[int, np.ndarray]], every_row: bool = True) -> StepArrays:
        """Pack the next tokens of each slot; ask for every row, or for the last of each."""
        ids, positions, mapping, starts, lens = [], [], [], [0], []
        for slot, tokens in chunks:
            first = self.done[slot]
            self.done[slot] = first + len(tokens)
            table = self.tables[slot]
            while len(table) * self.block_size < self.done[slot]:
                table.append(int(self.free.pop()))
            ids.extend(tokens)
            places = np.arange(first, self.done[slot])
            positions.extend(places)
            mapping.extend(np.array(table)[places // self.block_size] * self.block_size + places % self.block_size)
            starts.append(len(ids))
            lens.append(self.done[slot])
        tables = np.zeros((len(chunks), max(len(self.tables[s]) for s, _ in chunks) + 1), np.int32)
        for n, (slot, _) in enumerate(chunks):
            tables[n, : len(self.tables[slot])] = self.tables[slot]
        return StepArrays(
            input_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array(mapping, np.int64),
            query_starts=np.array(starts, np.int32),
            seq_lens=np.array(lens, np.int32),
            block_tables=tables,
            slots=np.array([slot for slot, _ in chunks], np.int32),
            logits_rows=np.arange(len(ids)) if every_row else np.array(starts[1:], np.int64) - 1,
            num_sampled=len(ids) if every_row else len(chunks),
        )


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large enough that attention matters
}


def build(kind: str, **changes: Any) -> Any:
    """Return a tiny random `{kind}ForCausalLM`, in float32 and evaluation mode."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return build


@pytest.fixture
def packer() -> type[Packer]:
    return Packer


def build_named(name: str, **changes: Any) -> Any:
    """Return a tiny random module of the class `name`, in float32 and evaluation mode.

    Takes the sizes of TINY that its configuration knows and `changes`; what those give as None is left out.
    """
    kind = getattr(transformers, name)
    known = kind.config_class()
    sizes = {key: value for key, value in TINY.items() if hasattr(known, key) or key in known.attribute_map}
    for key, value in changes.items():
        sizes[key] = value
        if value is None:
            del sizes[key]
    torch.manual_seed(0)
    return kind(kind.config_class(**sizes)).float().eval()


@pytest.fixture
def named() -> Callable[..., Any]:
    return build_named
