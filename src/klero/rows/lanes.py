"""Stored logits for Numba, and comparisons of 32 numbers at a time: bit j of the answer tells of the j-th.

LLVM makes of each a few vector compares, whatever the machine has; a loop over single numbers would branch at every
one of them. Agreement: *bits*, these are comparisons of integers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 32
WORD, REAL = ir.IntType(32), ir.FloatType()
VECTOR, REALS = ir.VectorType(WORD, LANES), ir.VectorType(REAL, LANES)
LOW_OF_HALF, INFINITE_HALF = 1 << 23, 0x7C00 << 13  # the least normal magnitude of float16 and its infinity, shifted


def _constant(kind: Any, value: float) -> Any:
    """A number, or 32 of it."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _everywhere(value: int) -> Any:
    return _constant(VECTOR, value)


def _widened(builder: Any, stored: Any, dtype: Any, kind: Any) -> Any:
    """binary32 bits of one stored logit or of 32. kind: WORD or VECTOR."""
    if dtype.bitwidth == 32:
        return stored
    if not dtype.signed:
        return builder.shl(builder.zext(stored, kind), _constant(kind, 16))
    return _widened_half(builder, builder.sext(stored, kind), kind)


def _widened_half(builder: Any, half: Any, kind: Any) -> Any:
    """binary32 bits of float16 bits, exactly: exponents grow by 112, that of infinity and NaN by 224.

    What is subnormal, m * 2^-24, is taken as the fraction of 2^-14 + m * 2^-24, less 2^-14: no subnormal arithmetic.
    """

    def word(value: int) -> Any:
        return _constant(kind, value)

    reals = REAL if kind is WORD else REALS
    size = builder.shl(builder.and_(half, word(0x7FFF)), word(13))
    fraction = builder.bitcast(builder.add(size, word(113 << 23)), reals)
    tiny = builder.bitcast(builder.fsub(fraction, _constant(reals, 2.0**-14)), kind)
    infinite = builder.icmp_unsigned(">=", size, word(INFINITE_HALF))
    normal = builder.add(size, builder.select(infinite, word(224 << 23), word(112 << 23)))
    found = builder.select(builder.icmp_unsigned("<", size, word(LOW_OF_HALF)), tiny, normal)
    return builder.or_(found, builder.and_(half, word(-(2**31))))


def _splat(builder: Any, value: Any) -> Any:
    """A scalar in all lanes."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, nothing, _everywhere(0))


def _lanes(context: Any, builder: Any, array: Any, struct: Any, begin: Any) -> Any:
    """The numbers from `begin` on, as they are stored. The caller knows that there are 32."""
    width = array.dtype.bitwidth
    place = builder.gep(context.make_array(array)(context, builder, struct).data, [begin])
    vector = ir.VectorType(ir.IntType(width), LANES)
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=width // 8)


@intrinsic
def bits_of(typing_context: Any, raw: Any) -> Any:
    """The binary32 bits of one stored logit: float32 bits (int32), bfloat16 bits (uint16) or float16 bits (int16)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _widened(builder, arguments[0], raw, WORD)

    return types.int32(raw), generate


@intrinsic
def keys_at_least(typing_context: Any, stored: Any, begin: Any, least: Any) -> Any:
    """Whether the ordered keys of stored[begin : begin + 32], not flushed, are at least `least`: uint32.

    stored: as for `bits_of`; contiguous.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct, begin, least = arguments
        bits = _widened(builder, _lanes(context, builder, stored, struct, begin), stored.dtype, VECTOR)
        sign = builder.ashr(bits, _everywhere(31))
        keys = builder.xor(bits, builder.and_(sign, _everywhere(0x7FFFFFFF)))
        return builder.bitcast(builder.icmp_signed(">=", keys, _splat(builder, least)), WORD)

    return types.uint32(stored, types.int64, types.int32), generate


@intrinsic
def words_at_most(typing_context: Any, words: Any, begin: Any, most: Any) -> Any:
    """Whether words[begin : begin + 32], uint32, contiguous, are at most `most`: uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct, begin, most = arguments
        found = _lanes(context, builder, words, struct, begin)
        return builder.bitcast(builder.icmp_unsigned("<=", found, _splat(builder, most)), WORD)

    return types.uint32(words, types.int64, types.uint32), generate


@intrinsic
def lowest_bit(typing_context: Any, mask: Any) -> Any:
    """The place of the lowest bit that is set; 32 where none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0)), ir.IntType(64))

    return types.int64(types.uint32), generate


@intrinsic
def num_bits(typing_context: Any, mask: Any) -> Any:
    """How many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.ctpop(arguments[0]), ir.IntType(64))

    return types.int64(types.uint32), generate


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in binary32, rounded once or twice, as is faster here: for bounds alone, never for a token."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = builder.module.declare_intrinsic("llvm.fmuladd", [REAL], ir.FunctionType(REAL, [REAL] * 3))
        return builder.call(made, arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def add_in_any_order(typing_context: Any, a: Any, b: Any) -> Any:
    """a + b in binary32, of a sum that may be taken in any order, so that it vectorises: for bounds alone.

    Numba's `fastmath` would reach into all that a kernel inlines.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments, flags=("reassoc", "nsz"))

    return types.float32(types.float32, types.float32), generate
