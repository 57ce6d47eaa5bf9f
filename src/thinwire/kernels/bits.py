"""Compiled helpers on bit patterns: 16-bit floats, FP8, packed codes, unaligned words.

Numba knows neither bf16 nor (on CPUs) fp16, so both travel as uint16. Every helper is free of
branches, so that LLVM turns the loops around it into SIMD code; integers are cast back after each
operation, since Numba widens them to 64 bits.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from thinwire.kernels.parallel import inline, jit

__all__ = [
    "add_block",
    "at_least",
    "bf16_bits",
    "f32",
    "float_order",
    "fp16_bits",
    "from_bf16",
    "from_fp16",
    "load_block",
    "load_u16",
    "load_u32",
    "load_u64",
    "pack_word",
    "store_block",
    "store_u16",
    "store_u32",
    "store_u64",
    "u32",
    "unpack_word",
]

_I32, _U8, _U16, _U32, _U64, _F32 = (
    np.int32,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float32,
)
_HALF_ULP = _F32(0.5)
_MIN_NORMAL_FP16 = _F32(2.0**-14)


@inline
def u32(x: Any) -> Any:
    """Return the bits of an fp32."""
    return _F32(x).view(np.uint32)


@inline
def f32(bits: Any) -> Any:
    """Return the fp32 with these bits."""
    return _U32(bits).view(np.float32)


@inline
def float_order(bits: Any) -> Any:
    """Return an int32 that orders as the fp32 with these int32 bits does (its own inverse)."""
    return _I32(bits ^ _I32(_I32(bits >> _I32(31)) & _I32(0x7FFFFFFF)))


@inline
def from_bf16(h: Any) -> Any:
    """Return a bf16 pattern as fp32."""
    return f32(_U32(_U32(h) << _U32(16)))


@inline
def bf16_bits(x: Any) -> Any:
    """Return fp32 rounded to bf16, ties to even, as a pattern."""
    u = u32(x)
    rounded = _U32(_U32(u + _U32(0x7FFF)) + _U32(_U32(u >> _U32(16)) & _U32(1)))
    nan = _U32(u & _U32(0x7FFFFFFF)) > _U32(0x7F800000)
    return _U16(_U32(0x7FC0) if nan else _U32(rounded >> _U32(16)))


@inline
def from_fp16(h: Any) -> Any:
    """Return an fp16 pattern as fp32, exactly."""
    o = _U32(_U32(_U32(h) & _U32(0x7FFF)) << _U32(13))
    exponent = _U32(o & _U32(0x0F800000))
    normal = _U32(o + _U32(112 << 23))
    special = _U32(o + _U32(224 << 23))
    small = u32(_F32(f32(_U32(o + _U32(113 << 23))) - _MIN_NORMAL_FP16))
    magnitude = normal
    if exponent == _U32(0x0F800000):
        magnitude = special
    if exponent == _U32(0):
        magnitude = small
    return f32(_U32(magnitude | _U32(_U32(_U32(h) & _U32(0x8000)) << _U32(16))))


@inline
def fp16_bits(x: Any) -> Any:
    """Return fp32 rounded to fp16, ties to even, as a pattern (infinity beyond 65519)."""
    u = u32(x)
    a = _U32(u & _U32(0x7FFFFFFF))
    odd = _U32(_U32(a >> _U32(13)) & _U32(1))
    # Exponent bias from 127 to 15 and half a unit in the last place, modulo 2^32.
    normal = _U32(_U32(_U32(a + _U32(0xC8000FFF)) + odd) >> _U32(13))
    small = _U32(u32(_F32(f32(a) + _HALF_ULP)) - _U32(0x3F000000))
    r = normal
    if a < _U32(0x38800000):
        r = small
    if a >= _U32(0x477FF000):
        r = _U32(0x7C00)
    if a > _U32(0x7F800000):
        r = _U32(0x7E00)
    return _U16(_U32(r | _U32(_U32(u >> _U32(16)) & _U32(0x8000))))


@jit
def load_block(x: Any, dtype: Any, begin: Any, count: Any, buf: Any) -> None:
    """Write x[begin : begin + count] as fp32 into buf[:count] (dtype: a code of DTYPE_CODES)."""
    part = x[begin : begin + count]
    if dtype == 0:
        for i in range(count):
            buf[i] = part[i]
    elif dtype == 1:
        for i in range(count):
            buf[i] = from_bf16(part[i])
    else:
        for i in range(count):
            buf[i] = from_fp16(part[i])


@jit
def store_block(buf: Any, count: Any, x: Any, dtype: Any, begin: Any) -> None:
    """Write buf[:count] into x[begin : begin + count], rounded to its dtype."""
    part = x[begin : begin + count]
    if dtype == 0:
        for i in range(count):
            part[i] = buf[i]
    elif dtype == 1:
        for i in range(count):
            part[i] = bf16_bits(buf[i])
    else:
        for i in range(count):
            part[i] = fp16_bits(buf[i])


@jit
def add_block(buf: Any, count: Any, x: Any, dtype: Any, begin: Any) -> None:
    """Add buf[:count] to x[begin : begin + count], an fp32 array (dtype 0)."""
    part = x[begin : begin + count]
    if dtype == 0:
        for i in range(count):
            part[i] += buf[i]


@inline
def _low_fields(width: Any, stride: Any) -> Any:
    """Return a mask of `width` low bits in every `stride` bits (16, 32 or 64) of a word."""
    field = (_U64(1) << _U64(width)) - _U64(1)
    if stride == 16:
        return field * _U64(0x0001000100010001)
    return field * _U64(0x100000001) if stride == 32 else field


@inline
def pack_word(w: Any, bits: Any) -> Any:
    """Squeeze 8 codes, one per byte of a 64-bit word, into its low 8*bits bits."""
    gap, width = _U64(8 - bits), _U64(bits)
    if bits < 8:
        for level in range(3):
            shift, field = gap << _U64(level), width << _U64(level)
            keep = _low_fields(field, 16 << level)
            w = (w & keep) | ((w >> shift) & (keep << field))
    return w


@inline
def unpack_word(w: Any, bits: Any) -> Any:
    """Spread 8 codes of `bits` bits over the bytes of a 64-bit word: inverts `pack_word`."""
    gap, width = _U64(8 - bits), _U64(bits)
    if bits < 8:
        for step in range(3):
            level = 2 - step
            shift, field = gap << _U64(level), width << _U64(level)
            keep = _low_fields(field, 16 << level)
            w = (w & keep) | ((w & (keep << field)) << shift)
    return w


def _unaligned(kind: Any, bits: int, store: bool) -> Any:
    """Return an intrinsic that reads or writes a little-endian word at a byte offset."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(base, [args[1]]), ir.IntType(bits).as_pointer())
        if store:
            builder.store(args[2], pointer, align=1)
            return context.get_dummy_value()
        return builder.load(pointer, align=1)

    if store:

        @intrinsic
        def word(typing_context, buffer, offset, value):  # type: ignore[no-untyped-def]
            return types.void(buffer, types.intp, kind), codegen
    else:

        @intrinsic
        def word(typing_context, buffer, offset):  # type: ignore[no-untyped-def]
            return kind(buffer, types.intp), codegen

    return word


def _codegen_mask16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    words, lanes = ir.VectorType(ir.IntType(32), 16), ir.IntType(16)
    base = context.make_array(signature.args[0])(context, builder, args[0]).data
    pointer = builder.bitcast(builder.gep(base, [args[1]]), words.as_pointer())
    value = builder.load(pointer, align=4)
    key = builder.and_(value, ir.Constant(words, [0x7FFFFFFF] * 16))
    floor = builder.insert_element(ir.Constant(words, ir.Undefined), args[2], ir.IntType(32)(0))
    floor = builder.shuffle_vector(floor, floor, ir.Constant(words, [0] * 16))
    mask = builder.icmp_signed(">=", key, floor)
    return builder.zext(builder.bitcast(mask, lanes), ir.IntType(32))


def _mask16(typing_context: Any, words: Any, at: Any, floor: Any) -> Any:
    return types.uint32(words, types.intp, types.int32), _codegen_mask16


# mask16(words, at, floor): which of the 16 fp32 patterns words[at:] have a magnitude >= floor.
mask16: Any = intrinsic(_mask16)


def _codegen_lowest(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.cttz(args[0], ir.IntType(1)(1))


def _lowest_bit(typing_context: Any, mask: Any) -> Any:
    return types.int64(types.uint64), _codegen_lowest


# lowest_bit(mask): the position of the lowest bit set in a uint64 that is not 0.
lowest_bit: Any = intrinsic(_lowest_bit)


@inline
def at_least(words: Any, begin: Any, count: Any, floor: Any, out: Any, n: Any) -> Any:
    """Append to out[n:] the positions i, ascending, with |words[begin + i]| >= floor, i < count.

    Positions beyond out's end are counted, not written. Return the new n.
    """
    whole = count - count % 64
    room = out.size
    for i in range(0, whole, 64):
        mask = _U64(0)
        for part in range(0, 64, 16):
            mask |= _U64(mask16(words, begin + i + part, floor)) << _U64(part)
        while mask != _U64(0):
            if n < room:
                out[n] = i + lowest_bit(mask)
            n += 1
            mask &= mask - _U64(1)
    for i in range(whole, count):
        if _I32(words[begin + i] & _I32(0x7FFFFFFF)) >= floor:
            if n < room:
                out[n] = i
            n += 1
    return n


load_u16 = _unaligned(types.uint16, 16, store=False)
load_u32 = _unaligned(types.uint32, 32, store=False)
load_u64 = _unaligned(types.uint64, 64, store=False)
store_u16 = _unaligned(types.uint16, 16, store=True)
store_u32 = _unaligned(types.uint32, 32, store=True)
store_u64 = _unaligned(types.uint64, 64, store=True)
