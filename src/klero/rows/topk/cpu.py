"""Top-k for Numba: selection by block maxima, then a sort of the k selected."""

from __future__ import annotations

from typing import Any

import numpy as np

from klero.device import kernel
from klero.lots.mass.cpu import I32, I64, KEY_NEG_INF, KEY_POS_INF, key_of_bits
from klero.rows.lanes import bits_of
from klero.rows.maxima.cpu import block_maxima, lowest_id
from klero.rows.room import carve
from klero.rows.select.cpu import gather, keep_top_k, top_k_bound
from klero.rows.view.cpu import BITS_NEG_INF, BLOCK, NONE_ABOVE, bits_at, flush_key, width_of

U32 = np.uint32
BITS_NAN = I32(0x7FC00000)
FEW = 256  # below it comparing sorts faster than counting
FEW_STEPS = 4096  # up to here inserting takes less than to select and to sort
DESCENDING = U32(0x7FFFFFFF)  # turns signed keys over, into unsigned ones


@kernel
def sort_few(keys: Any, ids: Any, n: int) -> None:
    """Bring n listed tokens into the total order, by comparing."""
    order = np.empty(n, np.int64)
    for i in range(n):
        order[i] = (-I64(keys[i]) << 32) + I64(ids[i])
    order.sort()
    for i in range(n):
        ids[i] = I32(order[i] & 0xFFFFFFFF)
        keys[i] = I32(-(order[i] >> 32))


@kernel
def sort_by_byte(keys: Any, ids: Any, n: int, shift: int, out_keys: Any, out_ids: Any) -> None:
    """Write n listed tokens by one byte of their keys, larger ones first, equal ones in the order they stand in."""
    places = np.zeros(257, np.int64)
    for i in range(n):
        places[1 + I64(((U32(keys[i]) ^ DESCENDING) >> U32(shift)) & U32(255))] += 1
    for byte in range(255):
        places[byte + 1] += places[byte]
    for i in range(n):
        byte = I64(((U32(keys[i]) ^ DESCENDING) >> U32(shift)) & U32(255))
        out_keys[places[byte]], out_ids[places[byte]] = keys[i], ids[i]
        places[byte] += 1


@kernel
def sort_listed(keys: Any, ids: Any, n: int, spare_keys: Any, spare_ids: Any) -> None:
    """Bring n listed tokens, ascending by id, into the total order. Spares: int32, n long, overwritten."""
    if n < FEW:
        sort_few(keys, ids, n)
        return
    for shift in range(0, 32, 16):
        sort_by_byte(keys, ids, n, shift, spare_keys, spare_ids)
        sort_by_byte(spare_keys, spare_ids, n, shift + 8, keys, ids)


@kernel
def insert_top(row: Any, k: int, keys: Any, ids: Any) -> None:
    """The first k tokens of a row in the total order, by inserting: for few steps, no more than V * k."""
    n = 0
    for i in range(width_of(row)):
        key = flush_key(key_of_bits(bits_at(row, i)))
        if n == k:
            if key <= keys[n - 1]:
                continue
            n -= 1
        j = n
        while j > 0 and keys[j - 1] < key:
            keys[j], ids[j] = keys[j - 1], ids[j - 1]
            j -= 1
        keys[j], ids[j] = key, i
        n += 1


@kernel
def list_top(row: Any, maxima: Any, k: int, keys: Any, ids: Any, spare: Any, weights: Any) -> None:
    """The first k tokens of a row in the total order, those with -inf at the end. The arrays are from `carve`."""
    width = width_of(row)
    if width * k <= FEW_STEPS:
        insert_top(row, k, keys, ids)
        return
    threshold = top_k_bound(row, maxima, k, spare, weights) if k < width else KEY_NEG_INF
    n = gather(row, maxima, threshold, keys, ids)
    if n > 2 * k:  # else to sort what is too much costs less than to find it
        n = keep_top_k(keys, ids, n, k, spare, weights)
    sort_listed(keys, ids, n, spare, weights.view(np.int32))


@kernel
def top_rows(room: Any, rows: Any, width: int, spans: Any, begin: int, end: int, values: Any, ids: Any) -> None:
    """Rows begin .. end - 1. room: from `klero.rows.room`, for rows of a width, which no span exceeds. rows: [R, N],
    as `bits_of` reads it. values: binary32 bits [R, k]."""
    (maxima, keys, listed, spare, weights, _), _ = carve(room, width)
    k = values.shape[1]
    for r in range(begin, end):
        first = spans[r, 0]
        row = rows[r][first : spans[r, 1]]
        blocks = maxima[: (row.size + BLOCK - 1) // BLOCK]
        top, widest = block_maxima(row, blocks)
        if top > KEY_POS_INF or widest > NONE_ABOVE:  # NaN
            values[r, :], ids[r, :] = BITS_NAN, I32(-1)
            continue
        n = min(k, row.size)
        if n == 1:
            listed[0] = lowest_id(row, blocks, flush_key(top))
        else:
            list_top(row, blocks, n, keys, listed, spare, weights)
        for j in range(n):
            values[r, j], ids[r, j] = bits_of(row[listed[j]]), first + listed[j]
        values[r, n:], ids[r, n:] = BITS_NEG_INF, I32(-1)
