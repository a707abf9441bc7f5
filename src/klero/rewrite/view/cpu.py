"""Rows for Numba: plain arrays and `View`, read through the same three functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from klero.device import inline, kernel
from klero.lots.mass.cpu import I32, TINY, flush, key_of_bits

BLOCK = 256
WORDS = BLOCK // 32  # of the mask, for one block
BITS_NEG_INF = I32(np.uint32(0xFF800000).view(np.int32))
ALL_ALLOWED = I32(-1)
BIT = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
KEY_MIN = I32(-(2**31))
U32 = np.uint32


class View(NamedTuple):
    """A row seen through its rewriting.

    raw: int32 (float32 bits) or uint16 (bfloat16 bits) [V], never written. copy: int32 [V], the binary32 bits of the
    blocks that are touched; the rest of it means nothing. touched: uint8 [B], 1 for a block that is read from the copy.
    """

    raw: Any
    copy: Any
    touched: Any


def bits_of(raw: Any) -> Any:
    """The binary32 bits of one stored logit: float32 bits as they are, bfloat16 bits shifted."""
    raise RuntimeError("bits_of is for kernels")


@overload(bits_of, strict=False)
def _bits_of(raw: Any) -> Any:
    if isinstance(raw, types.Integer) and raw.bitwidth == 16:
        return lambda raw: I32(I32(raw) << I32(16))
    return lambda raw: I32(raw)


@inline
def flush_key(key: np.int32) -> np.int32:
    """The key of a logit once |l| < 2^-64 is +0."""
    return I32(0) if -TINY <= key < TINY else key


@kernel
def largest_of_block(block: Any) -> tuple[np.int32, np.uint32]:
    """The largest key of a block, unflushed, and its largest raw bits."""
    largest, bits_most = KEY_MIN, U32(0)
    for i in range(block.size):
        bits = bits_of(block[i])
        key = key_of_bits(bits)
        largest = key if key > largest else largest
        bits_most = U32(bits) if U32(bits) > bits_most else bits_most
    return largest, bits_most


@kernel
def is_masked(mask: Any, b: int) -> bool:
    """Whether a mask bans anything in a block."""
    together = ALL_ALLOWED
    for word in mask[b * WORDS : (b + 1) * WORDS]:
        together &= word
    return together != ALL_ALLOWED


@kernel
def bans_all(words: Any) -> bool:
    """Whether the words of a mask allow nothing."""
    any_allowed = I32(0)
    for word in words:
        any_allowed |= word
    return any_allowed == 0


@kernel
def copy_masked(block: Any, words: Any, out: Any) -> None:
    """Copy a block, -inf where its words of the mask have a 0. (A table of bits vectorises where shifts do not.)"""
    for w in range((block.size + 31) // 32):
        word, part, copied = words[w], block[32 * w : 32 * w + 32], out[32 * w : 32 * w + 32]
        for i in range(part.size):
            copied[i] = bits_of(part[i]) if (word & BIT[i]) != 0 else BITS_NEG_INF


@kernel
def copy_flushed(block: Any, out: Any) -> None:
    """Copy a block, +0 for |l| < 2^-64."""
    for i in range(block.size):
        out[i] = flush(bits_of(block[i]))


@inline
def touch(raw: Any, copy: Any, touched: Any, b: int) -> None:
    """Copy block b of a view to where it may be written, unless it was."""
    if touched[b] == 0:
        touched[b] = 1
        copy_flushed(raw[b * BLOCK : (b + 1) * BLOCK], copy[b * BLOCK : (b + 1) * BLOCK])


@kernel
def touched_block(view: Any, b: int) -> Any:
    """Block b of the copy, which is made if it was not."""
    touch(view.raw, view.copy, view.touched, b)
    return view.copy[b * BLOCK : (b + 1) * BLOCK]


def width_of(row: Any) -> Any:
    """V of a row."""
    raise RuntimeError("width_of is for kernels")


@overload(width_of, strict=False)
def _width_of(row: Any) -> Any:
    return (lambda row: row.size) if isinstance(row, types.Array) else (lambda row: row.raw.size)


def block_of(row: Any, b: int) -> Any:
    """The stored logits of block b, to be read with `bits_of`."""
    raise RuntimeError("block_of is for kernels")


@overload(block_of, strict=False)
def _block_of(row: Any, b: int) -> Any:
    if isinstance(row, types.Array):
        return lambda row, b: row[b * BLOCK : (b + 1) * BLOCK]
    if row.types[0].dtype.bitwidth == 16:
        return lambda row, b: touched_block(row, b)

    def through(row: Any, b: int) -> Any:
        block = row.copy if row.touched[b] != 0 else row.raw
        return block[b * BLOCK : (b + 1) * BLOCK]

    return through


def raw_of(row: Any) -> Any:
    """The model's own logits, for blocks that are not `touched`."""
    raise RuntimeError("raw_of is for kernels")


@overload(raw_of, strict=False)
def _raw_of(row: Any) -> Any:
    return (lambda row: row) if isinstance(row, types.Array) else (lambda row: row.raw)


def is_touched(row: Any, b: int) -> bool:
    """Whether block b must be read through `block_of`. Hot loops ask first: that is cheaper than `block_of` for all."""
    raise RuntimeError("is_touched is for kernels")


@overload(is_touched, strict=False)
def _is_touched(row: Any, b: int) -> Any:
    return (lambda row, b: False) if isinstance(row, types.Array) else (lambda row, b: row.touched[b] != 0)


def bits_at(row: Any, i: int) -> Any:
    """The binary32 bits of one logit."""
    raise RuntimeError("bits_at is for kernels")


@overload(bits_at, strict=False)
def _bits_at(row: Any, i: int) -> Any:
    if isinstance(row, types.Array):
        return lambda row, i: bits_of(row[i])
    return lambda row, i: row.copy[i] if row.touched[i // BLOCK] != 0 else bits_of(row.raw[i])
