"""typical-p for Numba: the same radix select as top-p, by nearness to the entropy."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import inline, kernel
from klero.lots.mass.cpu import F32, I32
from klero.rows.select.cpu import ALL_ALIVE, fill_masses, gather, logit_of_key, mass_of_key, select
from klero.sampling.filters.cpu import keep_nucleus, needed_mass
from klero.sampling.filters.thresholds.cpu import entropy, surprise_from


@inline
def nearness(key: np.int32, maximum: np.float32, reciprocal: np.float32, level: np.float32, h: np.float32) -> np.int32:
    """-|(lse(Q) - s) - H| as an integer in the same order: a distance is not negative, so its bits are."""
    return I32(-F32(abs((level - (logit_of_key(key) - maximum) * reciprocal) - h)).view(np.int32))


@kernel
def keep_typical(row: Any, maxima: Any, top: np.int32, p: Any, keys: Any, ids: Any, spare: Any, weights: Any) -> int:
    """List what typical-p keeps, by ascending id; return how many. Of equal distances the total order decides."""
    maximum, reciprocal = logit_of_key(top), p.reciprocal
    mass, surprise = surprise_from(row, maxima, ALL_ALIVE, maximum, reciprocal)
    level, h = entropy(mass, surprise)
    need = needed_mass(mass, p.typical_p)
    n = gather(row, maxima, ALL_ALIVE, keys, ids)
    for i in range(n):
        spare[i] = nearness(keys[i], maximum, reciprocal, level, h)
        weights[i] = mass_of_key(keys[i], maximum, reciprocal)
    border, above = select(spare, weights, n, need)
    tied_keys, tied, count = np.empty(n, np.int32), np.empty(n, np.int32), 0
    for i in range(n):
        if nearness(keys[i], maximum, reciprocal, level, h) == border:
            tied_keys[count], tied[count] = keys[i], i
            count += 1
    fill_masses(tied_keys, count, maximum, reciprocal, weights)
    ties = keep_nucleus(tied_keys, tied, count, need - above, maximum, reciprocal, spare, weights)
    left, next_tied = 0, 0
    for i in range(n):
        is_tied = next_tied < ties and tied[next_tied] == i
        keep = is_tied or nearness(keys[i], maximum, reciprocal, level, h) > border
        next_tied += is_tied
        keys[left], ids[left] = keys[i], ids[i]
        left += keep
    return left
