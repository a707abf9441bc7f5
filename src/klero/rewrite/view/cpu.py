"""Rows for Numba: plain arrays and `View`, read through the same three functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from klero.device import inline, kernel
from klero.lots.mass.cpu import I32, KEY_NEG_INF, TINY, key_of_bits

BLOCK = 256
WORDS = BLOCK // 32  # of the mask, for one block
BITS_NEG_INF = I32(np.uint32(0xFF800000).view(np.int32))
ALL_ALLOWED = I32(-1)
BIT = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
KEY_MIN = I32(-(2**31))
U32 = np.uint32


class View(NamedTuple):
    """A row seen through its rewriting.

    raw: int32 (float32 bits) or uint16 (bfloat16 bits) [V], never written. heads: int32 [B], the first patch of each
    block, -1 where none; links: int32 [P], the next one; ids, bits: int32 [P], a token and its rewritten logit. mask:
    int32 [ceil(V / 32)], bit set where a token is allowed, or int32 [0] for no mask. touched: uint8 [B], 1 for a block
    that patches or the mask change; the others are read where they are. block: int32 [BLOCK], room for one block:
    `block_of` may return it, and the next call overwrites it.
    """

    raw: Any
    heads: Any
    links: Any
    ids: Any
    bits: Any
    mask: Any
    touched: Any
    block: Any


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


@inline
def is_allowed(mask: Any, i: int) -> bool:
    """Whether a mask allows one token; no mask allows all."""
    return mask.size == 0 or (mask[i >> 5] >> I32(i & 31)) & I32(1) == 1


@kernel
def copy_masked(block: Any, words: Any, out: Any) -> None:
    """Copy a block, -inf where its words of the mask have a 0. (A table of bits vectorises where shifts do not.)"""
    for w in range((block.size + 31) // 32):
        word, part, copied = words[w], block[32 * w : 32 * w + 32], out[32 * w : 32 * w + 32]
        for i in range(part.size):
            copied[i] = bits_of(part[i]) if (word & BIT[i]) != 0 else BITS_NEG_INF


@kernel
def largest_allowed(block: Any, words: Any, lanes: Any) -> np.int32:
    """The largest key of a block, flushed, among the tokens that its words of the mask allow. lanes: int32 [32]."""
    if bans_all(words):
        return KEY_NEG_INF
    lanes[:] = KEY_NEG_INF
    for w in range((block.size + 31) // 32):
        word, part = words[w], block[32 * w : 32 * w + 32]
        for i in range(part.size):
            key = key_of_bits(bits_of(part[i])) if (word & BIT[i]) != 0 else KEY_NEG_INF
            lanes[i] = key if key > lanes[i] else lanes[i]
    largest = KEY_NEG_INF
    for i in range(32):
        largest = max(largest, lanes[i])
    return flush_key(largest)


@kernel
def fill_block(view: Any, b: int) -> Any:
    """Copy block b into the view's room, with its mask and its patches."""
    first = b * BLOCK
    raw = view.raw[first : first + BLOCK]
    out = view.block[: raw.size]
    if view.mask.size > 0:
        copy_masked(raw, view.mask[b * WORDS : (b + 1) * WORDS], out)
    else:
        for i in range(raw.size):
            out[i] = bits_of(raw[i])
    j = view.heads[b]
    while j >= 0:
        out[view.ids[j] - first] = view.bits[j]
        j = view.links[j]
    return out


@kernel
def bits_through(view: Any, i: int) -> np.int32:
    """One logit of a view."""
    j = view.heads[i // BLOCK]
    while j >= 0:
        if view.ids[j] == i:
            return view.bits[j]
        j = view.links[j]
    return bits_of(view.raw[i]) if is_allowed(view.mask, i) else BITS_NEG_INF


def width_of(row: Any) -> Any:
    """V of a row."""
    raise RuntimeError("width_of is for kernels")


@overload(width_of, strict=False)
def _width_of(row: Any) -> Any:
    return (lambda row: row.size) if isinstance(row, types.Array) else (lambda row: row.raw.size)


def block_of(row: Any, b: int) -> Any:
    """The stored logits of block b, to be read with `bits_of`; valid until the next call for a view."""
    raise RuntimeError("block_of is for kernels")


@overload(block_of, strict=False)
def _block_of(row: Any, b: int) -> Any:
    if isinstance(row, types.Array):
        return lambda row, b: row[b * BLOCK : (b + 1) * BLOCK]
    if row.types[0].dtype.bitwidth == 16:
        return lambda row, b: fill_block(row, b)

    def through(row: Any, b: int) -> Any:
        if row.touched[b] == 0:
            return row.raw[b * BLOCK : (b + 1) * BLOCK]
        return fill_block(row, b)

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
    return lambda row, i: bits_through(row, i)
