"""Paged keys and values: where a step's tokens go, and which blocks its queries read.

Block b of size s covers the cache rows b*s .. b*s+s-1 of every layer. `PagedStep` turns the host's step
arrays into the tensors that all layers share, once a step; `PagedCache` holds the layers' keys and values.
Legend: T tokens of the step, B decodes of a group, L gathered keys, H query heads, Hk key heads, D head
width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from klero.errors import ModelError

if TYPE_CHECKING:
    from klero.batch import StepArrays


def attention_bias(
    query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return 0 where a query may see a key and -inf elsewhere, broadcast over both shapes.

    A query sees the keys at its own position and before; with a window, only the last `window` of those.
    """
    seen = key_positions <= query_positions
    if window is not None:
        seen &= key_positions > query_positions - window
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


@dataclass
class DecodeGroup:
    """Sequences with one query token each, read as one padded batch."""

    tokens: torch.Tensor  # int64 [B]: where in the step the queries are
    blocks: torch.Tensor  # int64 [B*blocks of the longest]: what to gather, sequence by sequence
    last_positions: torch.Tensor  # int64 [B]: position of the query, which is also the last key
    length: int  # L: gathered keys of each sequence, a whole number of blocks
    _bias: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask [B, 1, 1, L]; kept, since every layer asks for it again."""
        if (window, dtype) not in self._bias:
            queries = self.last_positions.view(-1, 1, 1, 1)
            keys = torch.arange(self.length, device=queries.device)
            self._bias[window, dtype] = attention_bias(queries, keys, window, dtype)
        return self._bias[window, dtype]


@dataclass
class PrefillChunk:
    """Two or more neighbouring tokens of one sequence."""

    start: int  # the tokens start:stop of the step
    stop: int
    blocks: torch.Tensor  # int64: the blocks of the sequence so far
    seq_len: int  # tokens of the sequence, this chunk included
    _bias: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the chunk is all of its sequence, so that no key has to be fetched."""
        return self.stop - self.start == self.seq_len

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask [1, 1, tokens of the chunk, seq_len]; kept for the next layer."""
        if (window, dtype) not in self._bias:
            keys = torch.arange(self.seq_len, device=self.blocks.device)
            queries = keys[self.seq_len - (self.stop - self.start) :].view(1, 1, -1, 1)
            self._bias[window, dtype] = attention_bias(queries, keys, window, dtype)
        return self._bias[window, dtype]


@dataclass
class PagedStep:
    """One step as the layers see it."""

    slot_mapping: torch.Tensor  # int64 [T]: cache row of each token's key and value
    fresh_blocks: torch.Tensor  # int64: blocks whose first row is written in this step
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]

    @classmethod
    def build(cls, step: StepArrays, block_size: int, device: torch.device | str = "cpu") -> PagedStep:
        """Lay out `step` for blocks of `block_size` tokens."""
        starts, seq_lens = step.query_starts, step.seq_lens
        num_queries = np.diff(starts)
        prefills = []
        for n in np.flatnonzero(num_queries > 1):
            blocks = step.block_tables[n, : -(-int(seq_lens[n]) // block_size)]
            prefills.append(PrefillChunk(int(starts[n]), int(starts[n + 1]), _to(blocks, device), int(seq_lens[n])))
        slot_mapping = np.asarray(step.slot_mapping)
        return cls(
            slot_mapping=_to(slot_mapping, device),
            fresh_blocks=_to(slot_mapping[slot_mapping % block_size == 0] // block_size, device),
            decodes=_group_decodes(step, np.flatnonzero(num_queries == 1), block_size, device),
            prefills=prefills,
        )


def _to(array: Any, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


def _group_decodes(
    step: StepArrays, decodes: np.ndarray, block_size: int, device: torch.device | str
) -> list[DecodeGroup]:
    """Group decodes, longest first, so that nobody is padded to more than twice its length."""
    num_blocks = -(-step.seq_lens[decodes].astype(np.int64) // block_size)
    order = np.argsort(-num_blocks, kind="stable")
    decodes, num_blocks = decodes[order], num_blocks[order]
    groups, first = [], 0
    while first < len(decodes):
        longest = int(num_blocks[first])
        last = first + int(np.count_nonzero(num_blocks[first:] * 2 >= longest))
        members = decodes[first:last]
        # Padding repeats a sequence's own last block, never block 0: a NaN of a neighbour times weight 0 is
        # NaN.
        columns = np.minimum(np.arange(longest), num_blocks[first:last, None] - 1)
        groups.append(
            DecodeGroup(
                tokens=_to(step.query_starts[members], device),
                blocks=_to(step.block_tables[members[:, None], columns].reshape(-1), device),
                last_positions=_to(step.seq_lens[members] - 1, device),
                length=longest * block_size,
            )
        )
        first = last
    return groups


@dataclass
class LayerCache:
    """Keys [rows, Hk, D] and values [rows, Hk, Dv] of one layer."""

    keys: torch.Tensor
    values: torch.Tensor


class PagedCache:
    """The paged keys and values of all layers of one model.

    A layer's tensors are made at its first `write`, so the model itself says how many heads it keeps and how
    wide they are; `reserve` makes the same tensors ahead of any write.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, LayerCache] = {}

    def reserve(self, shapes: dict[int, tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> None:
        """Make every layer's tensors now. `shapes` maps a layer to key heads, key width and value width."""
        rows = self.num_blocks * self.block_size
        for layer, (heads, key_width, value_width) in shapes.items():
            self.layers[layer] = LayerCache(
                # zeros, not empty: what lies there is multiplied by weight 0, and a chance NaN would survive
                # that
                torch.zeros(rows, heads, key_width, dtype=dtype, device=device),
                torch.zeros(rows, heads, value_width, dtype=dtype, device=device),
            )

    def shapes(self) -> dict[int, tuple[int, int, int]]:
        """Return key heads, key width and value width of each layer seen so far."""
        return {
            layer: (cache.keys.shape[1], cache.keys.shape[2], cache.values.shape[2])
            for layer, cache in self.layers.items()
        }

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, step: PagedStep) -> LayerCache:
        """Store the step's keys [T, Hk, D] and values [T, Hk, Dv] of `layer`; return the layer's cache."""
        shape = (keys.shape[1], keys.shape[2], values.shape[2])
        if layer not in self.layers:
            self.reserve({layer: shape}, keys.dtype, keys.device)
        cache = self.layers[layer]
        if (cache.keys.shape[1:], cache.values.shape[1:]) != (keys.shape[1:], values.shape[1:]):
            raise ModelError(f"layer {layer}: keys and values are now {shape} (heads, widths), not as before")
        if step.fresh_blocks.numel():
            # A block's former owner may have left NaN behind; the padding of a decode reads those rows.
            for tensor in (cache.keys, cache.values):
                tensor.view(self.num_blocks, -1).index_fill_(0, step.fresh_blocks, 0)
        cache.keys.index_copy_(0, step.slot_mapping, keys.to(cache.keys.dtype))
        cache.values.index_copy_(0, step.slot_mapping, values.to(cache.values.dtype))
        return cache

    def gather(self, tensor: torch.Tensor, blocks: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the rows of `blocks` as [batch, Hk, L, D] (a view of a fresh [batch, L, Hk, D])."""
        heads, width = tensor.shape[1:]
        rows = tensor.view(self.num_blocks, -1).index_select(0, blocks)
        return rows.view(batch, -1, heads, width).transpose(1, 2)
