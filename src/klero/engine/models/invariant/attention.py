"""Attention called with query rows and key lengths of one class, so that a query's bits do not depend on its company.

Keys are padded past the sequence and masked. A fused attention goes through the keys in blocks of 512; the product
over a shorter last block may add in another order, and so may one with very few query rows. Which lengths and row
counts agree is measured, as for products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from klero.engine.models.invariant.cancelling import pairs
from klero.errors import ModelError

BLOCK = 512  # keys that one product covers, here and in torch's fused attention
LENGTHS = (64, 128, 192, 256, 320, 384, 448)  # of a last block
ROWS = (1, 2, 4, 8, 16, 32)
REGISTERS = 16  # heads are padded to such widths: with odd ones, bits can depend on where in memory a row begins
MAX_ROWS = 1024
SCALE_OF_NOISE = 4.0  # makes scores of order 1 out of the rounding errors of cancelling products


@dataclass(frozen=True)
class KeyClass:
    """Calls that agree in bits: query rows in multiples of `rows`; whole blocks of keys, then one of `lengths`.

    fused: by torch's fused attention; else block by block (`attend_in_blocks`).
    """

    rows: int
    lengths: tuple[int, ...]
    fused: bool

    def num_rows(self, num_rows: int) -> int:
        """Return the query rows to call with."""
        return -(-num_rows // self.rows) * self.rows

    def num_keys(self, num_keys: int) -> int:
        """Return the key length to call with."""
        whole, rest = divmod(num_keys, BLOCK)
        return whole * BLOCK + (0 if rest == 0 else next((n for n in self.lengths if n >= rest), BLOCK))


@dataclass(frozen=True)
class Head:
    """What bits depend on besides the inputs: query heads of a key head, widths, dtype, and whether it is capped."""

    group: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    plain: bool  # neither soft cap nor sinks


def whole_registers(tensor: torch.Tensor) -> torch.Tensor:
    """Return [.., D] with D padded with zeros to a multiple of REGISTERS, which adds nothing to any product."""
    return F.pad(tensor, (0, -tensor.shape[-1] % REGISTERS))


def attend_fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Return the attention [B, H, Q, Dv] of `query` [B, H, Q, D] over [B, Hk, L, D]; a new tensor.

    `bias` is added to the scores (0 or -inf, broadcast to [B, 1, Q, L]); None means causal, with Q = L.
    """
    grouped = keys.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=bias, is_causal=bias is None, scale=scaling, enable_gqa=grouped
    )


def attend_in_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the same, with weights summed block after block of keys: masked blocks add exact zeros.

    score = scaling * q.k, capped to softcap * tanh(score / softcap); weight = exp(score - largest); output = sum of
    weights * values / (sum of weights, plus exp(sinks[head] - largest)).
    """
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.cat([(query @ some.transpose(2, 3)).float() for some in keys.split(BLOCK, 2)], -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    largest = scores.amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.float().view(1, -1, 1, 1)
    if sink is not None:
        largest = torch.maximum(largest, sink)
    weights = torch.exp(scores - largest)
    total = torch.zeros_like(largest) if sink is None else torch.exp(sink - largest)
    output = torch.zeros(*query.shape[:3], values.shape[3], dtype=torch.float32, device=query.device)
    for some, there in zip(weights.split(BLOCK, 3), values.split(BLOCK, 2), strict=True):
        total = total + some.sum(-1, keepdim=True)
        output += (some.to(values.dtype) @ there).float()
    return (output / total).to(values.dtype)


_classes: dict[tuple[Head, int], KeyClass] = {}  # of the process: what was measured, with so many threads


def key_class(head: Head) -> KeyClass:
    """Return the class for such heads, measured once; ModelError if there is none."""
    key = head, torch.get_num_threads()
    if key not in _classes:
        found = (head.plain and _measure(head, fused=True)) or _measure(head, fused=False)
        if found is None:
            raise ModelError(
                f"attention of width {head.key_width} in {head.dtype} gives other bits for other calls on this "
                "machine, however they are padded; pass deterministic=False to run it all the same"
            )
        _classes[key] = found
    return _classes[key]


class _Trial:
    """Attention on inputs that show the order of its sums: in the scores, and in the sum of values."""

    def __init__(self, head: Head, fused: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        num_keys, widths = 3 * BLOCK, (head.key_width, head.value_width)
        self.fused, self.dtype = fused, head.dtype
        # of scores: the products of a query and a key cancel; of values: the weighted values of two equal keys do
        noisy = [some.view(2, -1, widths[0]) for some in pairs(2 * num_keys, widths[0], generator)]
        queries = torch.randn(2, MAX_ROWS, widths[0], generator=generator)
        # within 64 keys each, so that they cancel in every length that is tried
        along = [pairs(2 * sum(widths), LENGTHS[0], generator) for _ in range(num_keys // LENGTHS[0])]
        equal, sizes = (
            torch.cat(parts, 1).T.view(num_keys, 2, -1).transpose(0, 1) for parts in zip(*along, strict=True)
        )
        keys, values = equal[..., : widths[0]], equal[..., widths[0] :]
        self.cases = (
            (queries, keys, values * sizes[..., widths[0] :], None),
            (noisy[0][:, :MAX_ROWS], noisy[1], values, SCALE_OF_NOISE),
        )

    def run(self, rows: int, seen: int, length: int, batch: int = 1) -> torch.Tensor:
        """Attend with `rows` queries over the first `seen` of `length` keys, on both kinds of inputs."""
        bias = torch.zeros(length)
        bias[seen:] = float("-inf")
        attend = attend_fused if self.fused else attend_in_blocks
        results = []
        for queries, keys, values, scale in self.cases:
            tensors = (queries[:, :rows], keys[:, :length], values[:, :length])
            query, key, value = (tensor.to(self.dtype).expand(batch, *tensor.shape) for tensor in tensors)
            results.append(attend(query, key, value, bias.to(self.dtype).expand(batch, 1, rows, length), scale))
        return torch.stack(results)

    def agree(self, rows: int, lengths: tuple[int, ...]) -> bool:
        """Whether calls with multiples of `rows` agree over whole blocks, in batches, and past the sequence."""
        base = self.run(256, BLOCK, BLOCK)
        for count in (rows, 3 * rows, 32 + rows, 192 + rows, 768 + rows):
            result = self.run(count, BLOCK, BLOCK)
            if not torch.equal(result[..., :256, :], base[..., :count, :]):
                return False
        few = base[..., :rows, :]
        return all(torch.equal(self.run(rows, BLOCK, length), few) for length in lengths) and all(
            torch.equal(result, few[:, 0]) for result in self.run(rows, BLOCK, BLOCK, batch=5).unbind(1)
        )

    def fits(self, rows: int, length: int) -> bool:
        """Whether a last block of `length` keys gives the bits of a whole one, as the first and as the second."""
        return all(
            torch.equal(self.run(rows, first + length, first + length), self.run(rows, first + length, first + BLOCK))
            for first in (0, BLOCK)
        )


def _measure(head: Head, *, fused: bool) -> KeyClass | None:
    """Return the widest class of this kind of attention; None if not even whole blocks of 32 rows agree."""
    trial = _Trial(head, fused)
    for rows in ROWS:
        if trial.agree(rows, (2 * BLOCK, 3 * BLOCK)):
            return KeyClass(rows, tuple(n for n in LENGTHS if trial.fits(rows, n)), fused)
    return None
