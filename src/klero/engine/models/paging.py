"""Paged keys and values: where a step's tokens go, and which blocks its queries read.

Block b of size s covers the cache rows b*s .. b*s+s-1 of every layer. `PagedStep` turns the host's step
arrays into the tensors that all layers share, once a step; `PagedCache` holds the layers' keys and values. Behind
the last block lies one more, the scratch block: tokens that belong to nobody are written there, and nobody reads it.
Legend: T tokens of the step, B sequences and Q queries of a span, L gathered keys, H query heads, Hk key heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from klero.errors import BlockError, ModelError

if TYPE_CHECKING:
    from klero.batch import StepArrays
    from klero.batch.scheduler_output import BlockMoves
    from klero.engine.models.invariant.attention import KeyClass


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
class Span:
    """Queries and the keys they may see, as one call of an attention: a group of decodes, or one chunk of a prompt.

    A group is B sequences with one query each; a chunk is one sequence with two queries or more, B = 1.
    """

    tokens: torch.Tensor  # int64 [B*Q]: where in the step the queries are, sequence by sequence
    blocks: torch.Tensor  # int64 [B*blocks of the longest]: what to gather, sequence by sequence
    positions: torch.Tensor  # int64 [B, 1, Q, 1]: of the queries
    num_keys: int  # L: keys of each sequence in the call, those that nobody may see included
    _bias: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """B: sequences."""
        return self.positions.shape[0]

    @property
    def whole(self) -> slice | None:
        """The tokens of the step, if this is a chunk that is all of its sequence: no key has to be fetched."""
        num_tokens = len(self.tokens)
        if self.batch == 1 and num_tokens > 1 and num_tokens == self.num_keys:
            return slice(int(self.tokens[0]), int(self.tokens[0]) + num_tokens)
        return None

    def bias(self, window: int | None, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
        """Return the additive mask [B, 1, num_rows, L], or [B, 1, 1, L] of decodes; kept for the next layer.

        Rows beyond the queries are padding: they see what the last query sees.
        """
        if (window, dtype) not in self._bias:
            keys = torch.arange(self.num_keys, device=self.positions.device)
            bias = attention_bias(self.positions, keys, window, dtype)
            missing = num_rows - bias.shape[2]
            if bias.shape[2] > 1 and missing > 0:
                bias = torch.cat([bias, bias[:, :, -1:].expand(-1, -1, missing, -1)], 2)
            self._bias[window, dtype] = bias
        return self._bias[window, dtype]


class PagedStep:
    """One step as the layers see it: where keys and values go, and the spans that are attended."""

    def __init__(
        self,
        step: StepArrays,
        cache: PagedCache,
        device: torch.device | str = "cpu",
        *,
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        mapping, block_size = np.asarray(step.slot_mapping), cache.block_size
        mapping = np.where(mapping < 0, cache.scratch_row, mapping)
        self.num_tokens = int(step.query_starts[-1])  # those of sequences; what comes after them is padding
        self.slot_mapping = _to(mapping, device)  # int64 [T]: cache row of each token's key and value
        self.fresh_blocks = _to(mapping[mapping % block_size == 0] // block_size, device)  # first row written here
        self._step, self._block_size, self._device = step, block_size, device
        self.written: set[int] = set()  # layers whose keys and values lie in the cache
        self._spans: dict[KeyClass | None, list[Span]] = {}

    def spans(self, shape: KeyClass | None) -> list[Span]:
        """Lay the step out for a kind of attention, once: key lengths as `shape` says; None: no more than needed."""
        if shape not in self._spans:
            lengths = self._step.seq_lens.astype(np.int64)
            # without a class, whole blocks for decodes, and exact lengths for chunks, which need no mask then
            num_queries = np.diff(self._step.query_starts)
            padded = lengths if shape is None else np.array([shape.num_keys(int(n)) for n in lengths])
            decodes = self._decodes(np.flatnonzero(num_queries == 1), padded, shape is None)
            chunks = [self._span(np.array([n]), int(padded[n])) for n in np.flatnonzero(num_queries > 1)]
            self._spans[shape] = decodes + chunks
        return self._spans[shape]

    def _decodes(self, members: np.ndarray, lengths: np.ndarray, in_blocks: bool) -> list[Span]:
        """Group decodes, longest first, so that nobody is padded to more than twice its length."""
        if in_blocks:
            lengths = -(-lengths // self._block_size) * self._block_size
        members = members[np.argsort(-lengths[members], kind="stable")]
        spans, first = [], 0
        while first < len(members):
            longest = int(lengths[members[first]])
            last = first + int(np.count_nonzero(lengths[members[first:]] * 2 >= longest))
            spans.append(self._span(members[first:last], longest))
            first = last
        return spans

    def _span(self, members: np.ndarray, num_keys: int) -> Span:
        """The sequences `members`, of equal numbers of queries, over `num_keys` keys."""
        step = self._step
        num_queries = int(step.query_starts[members[0] + 1] - step.query_starts[members[0]])
        counts = -(-step.seq_lens[members].astype(np.int64) // self._block_size)
        # Padding repeats a sequence's own last block, never block 0: a NaN of a neighbour times weight 0 is NaN.
        columns = np.minimum(np.arange(-(-num_keys // self._block_size)), counts[:, None] - 1)
        queries = np.arange(num_queries)
        positions = step.seq_lens[members, None].astype(np.int64) - num_queries + queries
        return Span(
            tokens=_to((step.query_starts[members, None] + queries).reshape(-1), self._device),
            blocks=_to(step.block_tables[members[:, None], columns].reshape(-1), self._device),
            positions=_to(positions, self._device).view(len(members), 1, num_queries, 1),
            num_keys=num_keys,
        )


def _to(array: Any, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


@dataclass
class LayerCache:
    """Keys [rows, Hk, D] and values [rows, Hk, Dv] of one layer."""

    keys: torch.Tensor
    values: torch.Tensor


class PagedCache:
    """The paged keys and values of all layers of one model.

    A layer's tensors are made at its first `write`, so the model itself says how many heads it keeps and how
    wide they are; `reserve` makes the same tensors ahead of any write. num_host_blocks: blocks of a second cache in
    the host's memory, which `move_blocks` swaps with.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_blocks, self.block_size, self.num_host_blocks = num_blocks, block_size, num_host_blocks
        self.scratch_row = num_blocks * block_size  # the first of the scratch block
        self.layers: dict[int, LayerCache] = {}
        self.host_layers: dict[int, LayerCache] = {}

    def reserve(self, shapes: dict[int, tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> None:
        """Make every layer's tensors now. `shapes` maps a layer to key heads, key width and value width."""
        pinned = torch.device(device).type == "cuda" and self.num_host_blocks > 0
        for layer, (heads, *widths) in shapes.items():
            # zeros, not empty: what lies there is multiplied by weight 0, and a chance NaN would survive that
            rows = (self.num_blocks + 1) * self.block_size
            self.layers[layer] = LayerCache(
                *(torch.zeros(rows, heads, width, dtype=dtype, device=device) for width in widths)
            )
            rows = self.num_host_blocks * self.block_size
            self.host_layers[layer] = LayerCache(
                *(torch.zeros(rows, heads, width, dtype=dtype, device="cpu", pin_memory=pinned) for width in widths)
            )

    def shapes(self) -> dict[int, tuple[int, int, int]]:
        """Return key heads, key width and value width of each layer seen so far."""
        return {
            layer: (cache.keys.shape[1], cache.keys.shape[2], cache.values.shape[2])
            for layer, cache in self.layers.items()
        }

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, step: PagedStep) -> LayerCache:
        """Store the step's keys [T, Hk, D] and values [T, Hk, Dv] of `layer`; return the layer's cache."""
        if layer in step.written:
            raise ModelError(
                f"layer {layer} attends twice in one step, and its cache holds one set of keys and values; such an "
                "architecture needs a Model of its own"
            )
        step.written.add(layer)
        shape = (keys.shape[1], keys.shape[2], values.shape[2])
        if layer not in self.layers:
            self.reserve({layer: shape}, keys.dtype, keys.device)
        cache = self.layers[layer]
        if (cache.keys.shape[1:], cache.values.shape[1:]) != (keys.shape[1:], values.shape[1:]):
            raise ModelError(f"layer {layer}: keys and values are now {shape} (heads, widths), not as before")
        if step.fresh_blocks.numel():
            # A block's former owner may have left NaN behind; the padding of a decode reads those rows.
            for tensor in (cache.keys, cache.values):
                self._blocks(tensor).index_fill_(0, step.fresh_blocks, 0)
        cache.keys.index_copy_(0, step.slot_mapping, keys.to(cache.keys.dtype))
        cache.values.index_copy_(0, step.slot_mapping, values.to(cache.values.dtype))
        return cache

    def gather(self, tensor: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the keys or values of a span as [B, Hk, L, D] (a view of a fresh [B, L or a little more, Hk, D])."""
        heads, width = tensor.shape[1:]
        rows = self._blocks(tensor).index_select(0, span.blocks)
        return rows.view(span.batch, -1, heads, width)[:, : span.num_keys].transpose(1, 2)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Carry out the moves of a step in all layers: swap_out, copy, swap_in, zero, and each list in its order.

        A block that is written and then read hands on what was written. BlockError, before anything moves, for a block
        that does not exist.
        """
        self._check(moves)
        copied: dict[int, int] = {}  # target -> the block whose content before all copies it gets
        for source, target in moves.copy:
            copied[target] = copied.get(source, source)
        swapped_out = {place: block for block, place in moves.swap_out}
        swapped_in = {block: place for place, block in moves.swap_in}
        for layer, cache in self.layers.items():
            host = self.host_layers[layer]
            for here, there in ((cache.keys, host.keys), (cache.values, host.values)):
                blocks, places = self._blocks(here), self._blocks(there)
                _copy(blocks, places, swapped_out)
                _copy(blocks, blocks, copied)
                _copy(places, blocks, swapped_in)
                if moves.zero:
                    blocks.index_fill_(0, _to(moves.zero, blocks.device), 0)

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of a layer by blocks: [blocks, block_size * heads * width]."""
        return tensor.view(-1, self.block_size * tensor.shape[1] * tensor.shape[2])

    def _check(self, moves: BlockMoves) -> None:
        """Raise BlockError for a block that is not there; an index out of range would end a GPU's whole process."""
        device = [block for block, _ in moves.swap_out] + [block for _, block in moves.swap_in]
        device += [block for pair in moves.copy for block in pair] + list(moves.zero)
        host = [place for _, place in moves.swap_out] + [place for place, _ in moves.swap_in]
        for kind, found, num in (("device", device, self.num_blocks), ("host", host, self.num_host_blocks)):
            if wrong := [block for block in found if not 0 <= block < num]:
                raise BlockError(
                    f"a move names the {kind} block {wrong[0]}, and there are {num} of them (0 .. {num - 1}); allocate "
                    "more, or mend the scheduler"
                )


def _copy(source: torch.Tensor, target: torch.Tensor, source_of: Mapping[int, int]) -> None:
    """Copy blocks [source_of[target]] of one tensor to blocks [target] of another, or of the same."""
    if source_of:
        # All of the content is read before anything changes: a target may be a source as well.
        content = source.index_select(0, _to(list(source_of.values()), source.device))
        target.index_copy_(0, _to(list(source_of), target.device), content.to(target.device))
