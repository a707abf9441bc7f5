"""Products of rows with a weight, called with row counts of one class only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from klero.engine.models.invariant.cancelling import product_inputs
from klero.engine.models.invariant.one import Ends, order_of
from klero.errors import ModelError

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# The row counts that are called: these, and multiples of 16 between them. Others are padded to the next. Two threads
# take some of the rows each, and a rest of one to three can fall into a class of its own.
COUNTS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 384, 512)
HOME = 16  # the class of this count is the one that is used


@dataclass(frozen=True)
class RowClass:
    """Row counts whose results agree in bits: those of COUNTS in least .. most, and multiples of 16 between.

    ended: the next count was measured and does not belong; else larger ones are measured when they are first needed.
    order: how klero's own product of one row adds to agree as well (one.py); None: one row is padded like others.
    """

    least: int
    most: int
    ended: bool = False
    order: Ends | None = None

    def count(self, num_rows: int) -> int:
        """Return the number of rows to call with, for 1 <= num_rows <= most."""
        if num_rows > 128:
            return -(-num_rows // 16) * 16
        return next(count for count in COUNTS if count >= max(num_rows, self.least))

    def lacks(self, num_rows: int) -> bool:
        """Whether larger counts should be measured before so many rows are computed."""
        return num_rows > self.most and not self.ended and self.most < COUNTS[-1]


def class_of(
    product: Product, weight: torch.Tensor, axis: int, num_rows: int = HOME, bias: torch.Tensor | None = None
) -> RowClass:
    """Measure `product(rows, weight)` for up to `num_rows` rows and return the class of HOME rows.

    `weight` is summed over `axis`. bias: what `product` adds to every row, if anything. ModelError where a row's result
    depends on its place in the call.
    """
    needed = next((count for count in COUNTS if count >= num_rows), COUNTS[-1])
    rows, weight = product_inputs(HOME, weight, axis)
    rows = rows.repeat(-(-needed // HOME), 1)  # so that every place is checked against the first ones
    expected = product(rows[:HOME], weight)
    if not torch.equal(product(rows[:HOME].roll(1, 0), weight), expected.roll(1, 0)):
        raise ModelError(
            f"a product with a weight of shape {tuple(weight.shape)} in {weight.dtype} gives other bits at another "
            "place of the same call on this machine; pass deterministic=False to run it all the same"
        )
    least, most, ended = HOME, HOME, False
    for count in reversed([count for count in COUNTS if count < HOME]):
        if not torch.equal(product(rows[:count], weight), expected[:count]):
            break
        least = count
    for count in (count for count in COUNTS if HOME < count <= needed):
        result = product(rows[:count], weight)
        if ended := not all(torch.equal(part, expected[: len(part)]) for part in result.split(HOME)):
            break
        most = count
    order = order_of(rows[:2], weight, expected, bias) if axis == 1 and least > 1 else None
    return RowClass(least, most, ended, order)


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
