"""The fused pass in NumPy: sort, cut, draw. The definition, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import name_of
from klero.lots.mass import canonical
from klero.params import RowParams
from klero.sampling.draw import draw
from klero.sampling.filters import Filter, FilterFailed, SortedRow, cuts, keep_own, total_order, weigh
from klero.sampling.greedy import greedy
from klero.sampling.status import BAD, EMPTY, FAILED, NO_TOKEN, OK


@dataclass(frozen=True)
class DrawnRow:
    """What one row came to. kept: ids that survived, in the total order; stages: (filter, tokens left).

    masses: of the tokens left after each stage, by the weights of the whole row, whose mass is `mass`; none for a
    greedy row. message: what went wrong where the status is FAILED; the stages before it are there.
    """

    status: int
    token: int
    kept: npt.NDArray[np.int64]
    stages: tuple[tuple[str, int], ...] = ()
    masses: tuple[int, ...] = ()
    mass: int = 0
    message: str | None = None


NOTHING = np.empty(0, np.int64)


def sample_row(
    raw: npt.NDArray[np.float32],
    row: RowParams,
    seed: int,
    position: int,
    child: int,
    filters: Sequence[Filter] = (),
) -> DrawnRow:
    """Return the token of one row. raw: float32 [V]; seed: 0 .. 2^64-1; filters: of one's own, in their order."""
    if np.isnan(raw).any() or (raw == np.inf).any():
        return DrawnRow(BAD, NO_TOKEN, NOTHING)
    logits = canonical(raw)
    order = total_order(logits)
    if len(order) == 0:
        return DrawnRow(EMPTY, NO_TOKEN, NOTHING)
    if row.greedy:
        return DrawnRow(OK, greedy(logits), order[:1], (("greedy", 1),))
    whole = left = weigh(order, logits[order], np.float32(row.reciprocal))
    mass_of = np.zeros(len(raw), np.uint64)
    mass_of[whole.ids] = whole.masses
    stages, sums = [], []
    try:
        for name, left in stages_of(whole, row, len(raw), seed, position, child, filters):
            stages.append((name, len(left)))
            sums.append(int(mass_of[left.ids].sum(dtype=np.uint64)))
    except FilterFailed as failed:
        return DrawnRow(FAILED, NO_TOKEN, NOTHING, tuple(stages), tuple(sums), whole.mass, str(failed))
    token, _ = draw(left.ids, left.scaled, seed, position, child)
    return DrawnRow(OK, token, left.ids, tuple(stages), tuple(sums), whole.mass)


def stages_of(
    row: SortedRow, params: RowParams, vocab_size: int, seed: int, position: int, child: int, filters: Sequence[Filter]
) -> Iterator[tuple[str, SortedRow]]:
    """Yield (filter, what is left), filters of one's own first. Raises FilterFailed."""
    for asked in filters:
        row = keep_own(row, asked, np.float32(params.reciprocal))
        yield name_of(asked), row
    yield from cuts(row, params, vocab_size, seed, position, child)


def sample_rows(
    rows: npt.NDArray[np.float32],
    chosen: npt.NDArray[np.int64],
    params: npt.NDArray[Any],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.uint32],
    children: npt.NDArray[np.uint32],
    token_ids: npt.NDArray[np.int32],
    status: npt.NDArray[np.uint8],
    num_kept: npt.NDArray[np.int32],
) -> None:
    """Fill token_ids, status and num_kept of the chosen rows. params: ROW_DTYPE [R]."""
    for i in chosen:
        drawn = sample_row(rows[i], RowParams(*params[i].item()), int(seeds[i]), int(positions[i]), int(children[i]))
        token_ids[i], status[i], num_kept[i] = drawn.token, drawn.status, len(drawn.kept)
