"""The fused pass in NumPy: sort, cut, draw. The definition, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.lots.mass import canonical, scaled, weights
from klero.params import RowParams
from klero.sampling.draw import draw
from klero.sampling.filters import cuts, total_order
from klero.sampling.greedy import greedy
from klero.sampling.status import BAD, EMPTY, NO_TOKEN, OK


@dataclass(frozen=True)
class DrawnRow:
    """What one row came to. kept: ids that survived, in the total order; stages: (filter, tokens left)."""

    status: int
    token: int
    kept: npt.NDArray[np.int64]
    stages: tuple[tuple[str, int], ...] = ()


NOTHING = np.empty(0, np.int64)


def sample_row(
    raw: npt.NDArray[np.float32], row: RowParams, seed: int, position: int, child: int
) -> DrawnRow:
    """Return the token of one row. raw: float32 [V]; seed: 0 .. 2^64-1."""
    if np.isnan(raw).any() or (raw == np.inf).any():
        return DrawnRow(BAD, NO_TOKEN, NOTHING)
    logits = canonical(raw)
    order = total_order(logits)
    if len(order) == 0:
        return DrawnRow(EMPTY, NO_TOKEN, NOTHING)
    if row.greedy:
        return DrawnRow(OK, greedy(logits), order[:1], (("greedy", 1),))
    s = scaled(logits[order], logits[order[0]], np.float32(row.reciprocal))
    stages = tuple(cuts(weights(s), row, len(logits)))
    kept = order[: stages[-1][1]] if stages else order
    token, _ = draw(kept, s[: len(kept)], seed, position, child)
    return DrawnRow(OK, token, kept, stages)


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
