"""Products of rows with a weight, called with row counts of one class only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from klero.engine.models.invariant.cancelling import product_inputs
from klero.engine.models.invariant.one import Ends, order_of
from klero.errors import ModelError

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# The row counts that are called: these, and multiples of 16 between them. Others are padded to the next. A processor
# with two threads gives each some of the rows, and a rest of one to three can fall into a class of its own.
COUNTS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 384, 512)
HOME = 16  # the class of this count is the one that is used, so that the choice does not depend on the clock
MAX_SECONDS = 0.2  # larger counts are not measured beyond this, and then not called either


@dataclass(frozen=True)
class RowClass:
    """Row counts whose results agree in bits: those of COUNTS in least .. most, and multiples of 16 between.

    order: how klero's own product of one row adds to agree as well (one.py); None: one row is padded like others.
    """

    least: int
    most: int
    order: Ends | None = None

    def count(self, num_rows: int) -> int:
        """Return the number of rows to call with, for 1 <= num_rows <= most."""
        if num_rows > 128:
            return -(-num_rows // 16) * 16
        return next(count for count in COUNTS if count >= max(num_rows, self.least))


def class_of(product: Product, weight: torch.Tensor, axis: int, bias: torch.Tensor | None = None) -> RowClass:
    """Measure `product(rows, weight)` and return the class of HOME rows; `weight` is summed over `axis`.

    bias: what `product` adds to every row, if anything.

    ModelError where a row's result depends on its place in the call.
    """
    rows, weight = product_inputs(COUNTS[-1], weight, axis)
    expected = product(rows[:HOME], weight)
    if not torch.equal(product(rows[:HOME].roll(1, 0), weight), expected.roll(1, 0)):
        raise ModelError(
            f"a product with a weight of shape {tuple(weight.shape)} in {weight.dtype} gives other bits at another "
            "place of the same call on this machine; pass deterministic=False to run it all the same"
        )
    least = most = HOME
    for count in reversed([count for count in COUNTS if count < HOME]):
        if not torch.equal(product(rows[:count], weight), expected[:count]):
            break
        least = count
    order = order_of(rows[:2], weight, expected, bias) if axis == 1 and least > 1 else None
    start = time.perf_counter()
    for count in (count for count in COUNTS if count > HOME):
        result = product(rows[:count], weight)
        if not torch.equal(result[: expected.shape[0]], expected):
            break
        most, expected = count, result
        if time.perf_counter() - start > MAX_SECONDS:
            break
    return RowClass(least, most, order)


def in_class(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, found: RowClass) -> torch.Tensor:
    """Return product(rows) for rows [R, K], called within the class: padded with zero rows, or cut into pieces."""
    num_rows = rows.shape[0]
    if num_rows == 0:
        return product(rows)
    if num_rows > found.most:
        return torch.cat([in_class(product, piece, found) for piece in rows.split(found.most)])
    count = found.count(num_rows)
    if count == num_rows:
        return product(rows)
    padded = rows.new_zeros(count, rows.shape[1])
    padded[:num_rows] = rows
    return product(padded)[:num_rows]
