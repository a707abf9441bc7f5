"""Philox4x32-10 in NumPy: the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
ROUNDS = 10

U32 = npt.NDArray[np.uint32]


def philox4x32(counter: npt.ArrayLike, key: tuple[int, int]) -> U32:
    """Return the four words for each counter. counter: uint32 [..., 4]; result: uint32 [..., 4]."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, dtype=np.uint64), -1, 0)
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * np.uint64(M0), c2 * np.uint64(M1)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & np.uint64(MASK),
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & np.uint64(MASK),
        )
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def words_of_ids(token_ids: npt.ArrayLike, seed: int, position: int, child: int, purpose: int) -> U32:
    """Return the word of each token id. token_ids: int [N]; seed: 0 .. 2^64-1; result: uint32 [N]."""
    ids = np.asarray(token_ids, dtype=np.int64)
    counter = np.empty((*ids.shape, 4), np.uint32)
    counter[..., 0], counter[..., 1:] = ids >> 2, (position, child, purpose)
    words = philox4x32(counter, (seed & MASK, seed >> 32))
    return np.take_along_axis(words, (ids & 3)[..., None], axis=-1)[..., 0]
