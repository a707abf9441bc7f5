"""Rows for Numba: plain arrays and `View`, read through the same three functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic, overload

from klero.device import inline, kernel
from klero.lots.mass.cpu import I32, I64, KEY_NEG_INF, KEY_POS_INF, TINY, flush, key_of_bits
from klero.rows.lanes import bits_of

BLOCK = 256
WORDS = BLOCK // 32  # of the mask, for one block
BITS_NEG_INF = I32(np.uint32(0xFF800000).view(np.int32))
ALL_ALLOWED = I32(-1)
BIT = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
KEY_MIN = I32(-(2**31))
NONE_ABOVE = np.uint32(0xFF800000)  # the bits of -inf; those above are NaN
U32 = np.uint32


RAW, MARKED, MASKED = I32(-1), I32(-2), I32(-3)


class View(NamedTuple):
    """A row seen through its rewriting.

    raw: [V], as `bits_of` reads it, never written. starts: int32 [B], for each block where
    its copy begins, or RAW: read where the model left it; MARKED: to be copied by `read_marked`; MASKED: to be copied
    through the mask when it is first read. copy: int32 [2 * B * BLOCK], binary32 bits, side by side; state: int32
    [2], how much of it is used, and 1 where no logit of the model is -inf. mask: int32 [ceil(V / 32)], bit set where
    a token is allowed, or int32 [0] for no mask. maxima: int32 [B], the largest key of each block, flushed; of a
    MASKED one a bound.
    """

    raw: Any
    starts: Any
    copy: Any
    state: Any
    mask: Any
    maxima: Any


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
def is_bad(top: np.int32, widest: np.uint32) -> bool:
    """Whether a row holds +inf or NaN of either sign. top, widest: its largest key, unflushed, and its largest bits."""
    return bool(top >= KEY_POS_INF or widest > NONE_ABOVE)


@inline
def all_and_any(mask: Any, b: int) -> tuple[np.int32, np.int32]:
    """The words of a mask for one block, joined by and (ALL_ALLOWED: it bans nothing) and by or (0: it bans all)."""
    together, either = ALL_ALLOWED, I32(0)
    for w in range(WORDS * b, min(WORDS * b + WORDS, mask.size)):
        together &= mask[w]
        either |= mask[w]
    return together, either


@inline
def num_allowed(mask: Any, b: int) -> int:
    """Tokens of block b that a mask allows, counted in pairs, fours, bytes and words."""
    count = U32(0)
    for w in range(WORDS * b, WORDS * b + WORDS):
        bits = U32(mask[w])
        bits = bits - ((bits >> U32(1)) & U32(0x55555555))
        bits = (bits & U32(0x33333333)) + ((bits >> U32(2)) & U32(0x33333333))
        count += U32(((bits + (bits >> U32(4))) & U32(0x0F0F0F0F)) * U32(0x01010101)) >> U32(24)
    return int(count)


@inline
def is_allowed(mask: Any, i: int) -> bool:
    """Whether a mask allows one token."""
    return (mask[i >> 5] >> I32(i & 31)) & I32(1) == 1


@kernel
def num_alive_of(block: Any) -> int:
    """Tokens of a few with l > -inf."""
    count = 0
    for i in range(block.size):
        count += key_of_bits(bits_of(block[i])) > KEY_NEG_INF
    return count


@kernel
def copy_masked(block: Any, words: Any, out: Any) -> None:
    """Copy a block, -inf where its words of the mask have a 0. out: other memory, or nothing vectorises.

    A table of bits vectorises where shifts do not.
    """
    for w in range((block.size + 31) // 32):
        word, part, copied = words[w], block[32 * w : 32 * w + 32], out[32 * w : 32 * w + 32]
        if word == 0:
            copied[:] = BITS_NEG_INF
            continue
        for i in range(part.size):
            bits = bits_of(part[i])
            copied[i] = bits if (word & BIT[i]) != 0 else BITS_NEG_INF


@kernel
def copy_flushed(block: Any, out: Any) -> None:
    """Copy a block, +0 for |l| < 2^-64."""
    for i in range(block.size):
        out[i] = flush(bits_of(block[i]))


@intrinsic
def borrowed(typing_context: Any, array: Any) -> Any:
    """The same memory without a reference count, which is atomic and would be touched for every block of a view.

    The caller keeps the array alive.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(array)(context, builder, args[0])
        struct.meminfo = struct.meminfo.type(None)
        return struct._getvalue()

    return array(array), generate


@intrinsic
def as_row(typing_context: Any, array: Any) -> Any:
    """The same array with the type of float32 rows, which are read-only: what reads rows is then compiled once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return impl_ret_borrowed(context, builder, signature.return_type, args[0])

    return types.Array(types.int32, 1, "C", readonly=True)(array), generate


@kernel
def room_in_copy(view: Any, b: int) -> Any:
    """Where block b will be read from now on, to be filled from where it was: once, and once more for a mask."""
    begin = view.state[0]
    view.starts[b] = begin
    view.state[0] = begin + BLOCK
    return view.copy[begin : begin + min(BLOCK, view.raw.size - b * BLOCK)]


@kernel
def block_in_copy(view: Any, b: int) -> Any:
    """Block b of a view, copied if it was not."""
    begin = I64(view.starts[b])
    if begin >= 0:
        return view.copy[begin : begin + min(BLOCK, view.raw.size - b * BLOCK)]
    block, out = view.raw[b * BLOCK : (b + 1) * BLOCK], room_in_copy(view, b)
    if begin == MASKED:
        copy_masked(block, view.mask[b * WORDS : (b + 1) * WORDS], out)
        view.maxima[b] = flush_key(largest_of_block(out)[0])
    else:
        copy_flushed(block, out)
    return out


@kernel
def bits_through(view: Any, i: int) -> np.int32:
    """One logit of a view."""
    begin = I64(view.starts[i // BLOCK])
    if begin >= 0:
        return view.copy[begin + i % BLOCK]
    return bits_of(view.raw[i]) if begin == RAW or is_allowed(view.mask, i) else BITS_NEG_INF


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
        return lambda row, b: block_in_copy(row, b)

    def through(row: Any, b: int) -> Any:
        return row.raw[b * BLOCK : (b + 1) * BLOCK] if row.starts[b] == RAW else block_in_copy(row, b)

    return through


def raw_of(row: Any) -> Any:
    """The model's own logits, for blocks that are not `touched`."""
    raise RuntimeError("raw_of is for kernels")


@overload(raw_of, strict=False)
def _raw_of(row: Any) -> Any:
    return (lambda row: row) if isinstance(row, types.Array) else (lambda row: row.raw)


def is_pending(row: Any, b: int) -> bool:
    """Whether the maximum of block b is a bound, because its mask was not applied yet."""
    raise RuntimeError("is_pending is for kernels")


@overload(is_pending, strict=False)
def _is_pending(row: Any, b: int) -> Any:
    return (lambda row, b: False) if isinstance(row, types.Array) else (lambda row, b: row.starts[b] == MASKED)


def is_touched(row: Any, b: int) -> bool:
    """Whether block b must be read through `block_of`. Hot loops ask first: that is cheaper than `block_of` for all."""
    raise RuntimeError("is_touched is for kernels")


@overload(is_touched, strict=False)
def _is_touched(row: Any, b: int) -> Any:
    return (lambda row, b: False) if isinstance(row, types.Array) else (lambda row, b: row.starts[b] != RAW)


def num_alive(row: Any, widest: Any) -> Any:
    """Tokens with l > -inf. widest: the largest raw bits of a plain row; one without -inf is not read again."""
    raise RuntimeError("num_alive is for kernels")


@overload(num_alive, strict=False)
def _num_alive(row: Any, widest: Any) -> Any:
    if isinstance(row, types.Array):
        return lambda row, widest: row.size if widest < NONE_ABOVE else num_alive_of(row)

    def of_view(row: Any, widest: Any) -> Any:
        count, whole = 0, row.state[1] != 0
        for b in range(row.starts.size):
            if whole and row.starts[b] == RAW:
                count += min(BLOCK, row.raw.size - b * BLOCK)
            elif whole and row.starts[b] == MASKED and (b + 1) * BLOCK <= row.raw.size:
                count += num_allowed(row.mask, b)
            else:
                count += num_alive_of(block_of(row, b))
        return count

    return of_view


def bits_at(row: Any, i: int) -> Any:
    """The binary32 bits of one logit."""
    raise RuntimeError("bits_at is for kernels")


@overload(bits_at, strict=False)
def _bits_at(row: Any, i: int) -> Any:
    if isinstance(row, types.Array):
        return lambda row, i: bits_of(row[i])
    return lambda row, i: bits_through(row, i)
