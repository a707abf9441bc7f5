"""The draw in NumPy: the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.lots.noise import lots_of_ids


def draw(
    kept: npt.NDArray[np.int64], s: npt.NDArray[np.float32], seed: int, position: int, child: int
) -> tuple[int, np.float32]:
    """Return the token that wins and its score. kept: ids [N], N > 0; s: their scaled logits [N]."""
    score = s + lots_of_ids(kept, seed, position, child)
    best = score.max()
    return int(kept[score == best].min()), best
