"""Comparisons of 32 numbers at a time for Numba: bit j of the answer tells of the j-th.

LLVM makes of each a few vector compares, whatever the machine has; a loop over single numbers would branch at every
one of them. Agreement: *bits*, these are comparisons of integers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 32
WORD = ir.IntType(32)
VECTOR = ir.VectorType(WORD, LANES)


def _everywhere(value: int) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


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
def keys_at_least(typing_context: Any, stored: Any, begin: Any, least: Any) -> Any:
    """Whether the ordered keys of stored[begin : begin + 32], not flushed, are at least `least`: uint32.

    stored: float32 bits as int32, or bfloat16 bits as uint16; contiguous.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct, begin, least = arguments
        bits = _lanes(context, builder, stored, struct, begin)
        if stored.dtype.bitwidth == 16:
            bits = builder.shl(builder.zext(bits, VECTOR), _everywhere(16))
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
        real = ir.FloatType()
        made = builder.module.declare_intrinsic("llvm.fmuladd", [real], ir.FunctionType(real, [real] * 3))
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
