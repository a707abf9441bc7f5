"""Inputs that show in which order a product adds: every term has a partner of opposite sign, so only rounding is left.

The exact result is 0. What is computed is the rounding errors of the partial sums, which another order changes nearly
everywhere. The terms are of very different sizes, because the product of two bfloat16 has 16 bits and a short sum of
like ones is exact in float32, whatever the order; and as no large sum is left, a bfloat16 result shows the errors as
well.
"""

from __future__ import annotations

import torch

MAX_EXPONENT = 20


def pairs(num_rows: int, width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices [num_rows, width] whose products, elementwise, cancel in pairs at random places of the width.

    Entries of the first are normal and equal for partners; those of the second are 1 to 2^MAX_EXPONENT in size, with
    opposite signs, and 0 for a place left over. No product is exact in float32, so that fused multiply-adds show too.
    """
    order = torch.randperm(width, generator=generator)
    num_pairs = width // 2
    partner, sign = torch.empty(width, dtype=torch.long), torch.zeros(width)
    partner[order] = torch.arange(width) // 2
    sign[order[: 2 * num_pairs]] = torch.tensor([1.0, -1.0]).repeat(num_pairs)
    equal = torch.randn(num_rows, num_pairs + 1, generator=generator)
    sizes = (torch.rand(num_rows, num_pairs + 1, generator=generator) * MAX_EXPONENT).exp2()
    return equal[:, partner], sizes[:, partner] * sign


def product_inputs(num_rows: int, weight: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [num_rows, K] and a weight like `weight` (shape, strides, dtype), which is summed over `axis`."""
    width, others = weight.shape[axis], weight.numel() // weight.shape[axis]
    some = min(others, 512)  # outputs repeat beyond: their number matters to a kernel, not that they differ
    columns, rows = pairs(max(some, num_rows), width, torch.Generator().manual_seed(width))
    like = torch.empty_like(weight)
    outputs = like if axis == 1 else like.T
    for begin in range(0, others, some):
        outputs[begin : begin + some] = columns[: min(some, others - begin)]
    return rows[:num_rows].to(weight.dtype), like
