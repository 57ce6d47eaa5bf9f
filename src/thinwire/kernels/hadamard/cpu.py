"""Scaled and rotated groups on CPU threads: equals `reference.py` bit for bit.

A group stays in the first-level cache from load to store. FP8 is rounded by integer arithmetic.
"""

from typing import Any

import numpy as np

from thinwire.kernels.bits import (
    bf16_bits,
    f32,
    fp16_bits,
    from_bf16,
    from_fp16,
    load_block,
    load_u32,
    pack_word,
    store_block,
    store_u32,
    store_u64,
    u32,
    unpack_word,
)
from thinwire.kernels.hadamard.vectors import LANES, add16, butterfly16, sum16, transform16
from thinwire.kernels.parallel import inline, jit

__all__ = ["decode", "decode_sum", "decode_sum_encode", "encode"]

_I32, _U8, _U32, _U64, _F32 = np.int32, np.uint8, np.uint32, np.uint64, np.float32
_E4M3, _E5M2, _INT8, _INT4 = 0, 1, 2, 3
_ROUND = _F32(12582912.0)
# Turn eight signed codes, a byte each, into unsigned 4-bit codes with an offset of 8.
_SIGNS, _NIBBLES = _U64(0x0808080808080808), _U64(0x0F0F0F0F0F0F0F0F)
# Divides the smallest group.
_LANES = 32
_NAN = _F32(np.nan)
_ONE, _ZERO, _TINY, _LAMBDA = _F32(1.0), _F32(0.0), _F32(1e-12), _F32(1e-6)
_ALPHA_LOW, _ALPHA_HIGH = _F32(1e-3), _F32(1e3)
_E4M3_MAGIC, _E5M2_MAGIC = _F32(2.0**14), _F32(2.0**7)
_E4M3_ULP, _E5M2_ULP = _F32(2.0**-9), _F32(2.0**-16)


@inline
def e4m3_bits(y: Any) -> Any:
    """Return fp32 within +-448 as an E4M3 byte, ties to even."""
    u = u32(y)
    a = _U32(u & _U32(0x7FFFFFFF))
    odd = _U32(_U32(a >> _U32(20)) & _U32(1))
    r = _U32(_U32(_U32(_U32(a + _U32(0x7FFFF)) + odd) >> _U32(20)) - _U32(120 << 3))
    if a < _U32(0x3C800000):  # below 2^-6: the sum's last place is 2^-9
        r = _U32(u32(_F32(f32(a) + _E4M3_MAGIC)) - _U32(0x46800000))
    return _U8(_U32(r | _U32(_U32(u >> _U32(24)) & _U32(0x80))))


@inline
def e5m2_bits(y: Any) -> Any:
    """Return fp32 within +-57344 as an E5M2 byte, ties to even."""
    u = u32(y)
    a = _U32(u & _U32(0x7FFFFFFF))
    odd = _U32(_U32(a >> _U32(21)) & _U32(1))
    r = _U32(_U32(_U32(_U32(a + _U32(0xFFFFF)) + odd) >> _U32(21)) - _U32(112 << 2))
    if a < _U32(0x38800000):  # below 2^-14
        r = _U32(u32(_F32(f32(a) + _E5M2_MAGIC)) - _U32(0x43000000))
    return _U8(_U32(r | _U32(_U32(u >> _U32(24)) & _U32(0x80))))


@inline
def e4m3_value(c: Any) -> Any:
    """Return an E4M3 byte as fp32 (the NaN codes are the caller's)."""
    a = _U32(_U32(c) & _U32(0x7F))
    x = u32(_F32(_I32(a)) * _E4M3_ULP)
    if a >= _U32(8):
        x = _U32(_U32(a << _U32(20)) + _U32(120 << 23))
    return f32(_U32(x | _U32(_U32(_U32(c) & _U32(0x80)) << _U32(24))))


@inline
def e5m2_value(c: Any) -> Any:
    """Return an E5M2 byte as fp32 (infinity and NaN are the caller's)."""
    a = _U32(_U32(c) & _U32(0x7F))
    x = u32(_F32(_I32(a)) * _E5M2_ULP)
    if a >= _U32(4):
        x = _U32(_U32(a << _U32(21)) + _U32(112 << 23))
    return f32(_U32(x | _U32(_U32(_U32(c) & _U32(0x80)) << _U32(24))))


@inline
def _butterflies(buf: Any, size: Any) -> None:
    """Transform buf[:size] in place: strides 1, 2, 4, 8 in registers, then 16, 32, ..."""
    for i in range(0, size, LANES):
        transform16(buf, i)
    h = LANES
    while h < size:
        for begin in range(0, size, 2 * h):
            for i in range(begin, begin + h, LANES):
                butterfly16(buf, i, i + h)
        h *= 2


@inline
def _scale_by(buf: Any, size: Any, factor: Any) -> None:
    for i in range(size):
        buf[i] *= factor


@inline
def _max_bits(words: Any, size: Any) -> Any:
    """Return the largest |x| as bits; infinity and NaN are 0x7F800000 and above."""
    top = _I32(0)
    for i in range(size):
        top = max(top, _I32(words[i] & _I32(0x7FFFFFFF)))
    return top


@inline
def _mean_square(buf: Any, square: Any, size: Any) -> Any:
    for i in range(size):
        square[i] = buf[i] * buf[i]
    h = size // 2
    while h >= LANES:
        for i in range(0, h, LANES):
            add16(square, i, i + h)
        h //= 2
    return sum16(square, 0) * _F32(1.0 / size)


@inline
def _round_codes(buf: Any, size: Any, s: Any, limit: Any, fmt: Any, q: Any) -> None:
    # Loops of a fixed length become SIMD code without remainders.
    for c in range(0, size, _LANES):
        if fmt == _E4M3:
            for i in range(_LANES):
                q[_U64(c + i)] = e4m3_bits(min(max(buf[_U64(c + i)] / s, -limit), limit))
        elif fmt == _E5M2:
            for i in range(_LANES):
                q[_U64(c + i)] = e5m2_bits(min(max(buf[_U64(c + i)] / s, -limit), limit))
        else:
            for i in range(_LANES):
                y = min(max(buf[_U64(c + i)] / s, -limit), limit)
                q[_U64(c + i)] = _U8(_I32(_F32(y + _ROUND).view(np.int32)))


@inline
def _write_codes(
    buf: Any, size: Any, s: Any, limit: Any, fmt: Any, q: Any, out: Any, begin: Any
) -> None:
    _round_codes(buf, size, s, limit, fmt, q)
    words = q.view(np.uint64)
    if fmt == _INT4:
        for j in range(size // 8):
            words[_U64(j)] = pack_word((words[_U64(j)] ^ _SIGNS) & _NIBBLES, 4)
        for j in range(size // 8):
            store_u32(out, begin + 4 * j, _U32(words[_U64(j)]))
    else:
        for j in range(size // 8):
            store_u64(out, begin + 8 * j, words[_U64(j)])


@inline
def _encode_group(
    buf: Any, words: Any, square: Any, q: Any, size: Any, out: Any, b: Any, spec: Any, rotated: Any
) -> Any:
    """Write the codes of buf as group b of out; return s, alpha and whether it was coded."""
    fmt, hadamard, send_alpha, _, _, target, limit, inv_root, low, high, _, _ = spec
    width = _width(fmt, size)
    alpha = _ONE
    ok = _max_bits(words, size) < _I32(0x7F800000)
    s = _ONE
    if ok:
        if send_alpha:
            m = max(_mean_square(buf, square, size) + _LAMBDA, _TINY)
            alpha = min(max(target / np.sqrt(m), _ALPHA_LOW), _ALPHA_HIGH)
            _scale_by(buf, size, alpha)
        if hadamard and not rotated:
            _butterflies(buf, size)
            _scale_by(buf, size, inv_root)
        top = _max_bits(words, size)
        ok = top < _I32(0x7F800000)
        s = max(max(f32(_U32(top)), low) / target, low)
        if fmt <= _E5M2:
            s = min(s, high)
        ok = ok and s <= high
    if ok:
        _write_codes(buf, size, s, limit, fmt, q, out, b * width)
    else:
        zero = _U8(0x88) if fmt == _INT4 else _U8(0)
        for i in range(b * width, (b + 1) * width):
            out[i] = zero
    return s, alpha, ok


@inline
def _write_fields(
    out: Any, b: Any, groups: Any, width: Any, s: Any, alpha: Any, ok: Any, spec: Any
) -> None:
    _, _, send_alpha, merge, zero, _, _, _, _, _, _, _ = spec
    at = groups * width + 4 * b
    if send_alpha and not merge:
        if not ok:
            s = _TINY if zero else _NAN
            alpha = _ALPHA_LOW
        store_u32(out, at, u32(s))
        store_u32(out, at + 4 * groups, u32(alpha))
    else:
        if merge and send_alpha:
            s = s / alpha
        if not ok:
            s = -_TINY if zero else _NAN
        store_u32(out, at, u32(s))


@inline
def _width(fmt: Any, size: Any) -> Any:
    return size // 2 if fmt == _INT4 else size


@jit
def encode(
    start: Any, stop: Any, x: Any, dtype: Any, out: Any, groups: Any, size: Any, spec: Any
) -> None:
    """Encode groups start..stop of x into out."""
    buf = np.empty(size, np.float32)
    words = buf.view(np.int32)
    square = np.empty(size, np.float32)
    q = np.empty(size, np.uint8)
    width = _width(spec[0], size)
    for b in range(start, stop):
        count = max(0, min(size, x.size - b * size))
        load_block(x, dtype, b * size, count, buf)
        for i in range(count, size):
            buf[i] = _ZERO
        s, alpha, ok = _encode_group(buf, words, square, q, size, out, b, spec, False)
        _write_fields(out, b, groups, width, s, alpha, ok, spec)


@inline
def _read_fp8(payload: Any, size: Any, fmt: Any, s: Any, buf: Any) -> Any:
    top = _I32(0)
    for i in range(size):
        top = max(top, _I32(_I32(payload[i]) & _I32(0x7F)))
    if top >= (_I32(0x7F) if fmt == _E4M3 else _I32(0x7C)):
        s = _NAN
    if fmt == _E4M3:
        for i in range(size):
            buf[i] = e4m3_value(payload[i]) * s
    else:
        for i in range(size):
            buf[i] = e5m2_value(payload[i]) * s
    return s


@inline
def _read_values(payload: Any, size: Any, fmt: Any, s: Any, q: Any, buf: Any) -> Any:
    """Write s*q into buf; return s, or NaN if a code is not finite."""
    if fmt <= _E5M2:
        return _read_fp8(payload, size, fmt, s, buf)
    if fmt == _INT8:
        signed = payload.view(np.int8)
        for i in range(size):
            buf[i] = _F32(_I32(signed[i])) * s
    else:
        words = q.view(np.uint64)
        for j in range(size // 8):
            words[j] = unpack_word(np.uint64(load_u32(payload, 4 * j)), 4)
        for i in range(size):
            buf[i] = _F32(_I32(_I32(q[i]) - _I32(8))) * s
    return s


@inline
def _read_scales(wire: Any, b: Any, groups: Any, width: Any, spec: Any) -> Any:
    _, _, send_alpha, merge, _, _, _, _, _, _, low, high = spec
    at = groups * width + 4 * b
    s = f32(load_u32(wire, at))
    alpha = _ONE
    valid = s >= low and s <= high
    if send_alpha and not merge:
        alpha = f32(load_u32(wire, at + 4 * groups))
        valid = valid and alpha >= _ALPHA_LOW and alpha <= _ALPHA_HIGH
        zeroed = s == _TINY and alpha == _ALPHA_LOW
    else:
        zeroed = s == -_TINY
    if zeroed:
        return _ZERO, _ONE
    if not valid:
        return _NAN, _ONE
    return s, alpha


@inline
def _decode_group(
    wire: Any, b: Any, groups: Any, size: Any, q: Any, buf: Any, spec: Any, rotated: Any
) -> None:
    """Write group b into buf; the transform is left out for the rotated domain."""
    fmt, hadamard, send_alpha, merge, _, _, _, inv_root, _, _, _, _ = spec
    width = _width(fmt, size)
    s, alpha = _read_scales(wire, b, groups, width, spec)
    payload = wire[b * width : (b + 1) * width]
    s = _read_values(payload, size, fmt, s, q, buf)
    if np.isnan(s):
        for i in range(size):
            buf[i] = _NAN
        return
    if hadamard and not rotated:
        _butterflies(buf, size)
        _scale_by(buf, size, inv_root)
    if send_alpha and not merge:
        for i in range(size):
            buf[i] /= alpha


@jit
def decode(
    start: Any, stop: Any, wire: Any, x: Any, dtype: Any, groups: Any, size: Any, spec: Any
) -> None:
    """Decode groups start..stop into x."""
    buf = np.empty(size, np.float32)
    q = np.empty(size, np.uint8)
    for b in range(start, stop):
        count = min(size, x.size - b * size)
        if count <= 0:
            break
        _decode_group(wire, b, groups, size, q, buf, spec, False)
        store_block(buf, count, x, dtype, b * size)


@inline
def _round_to(buf: Any, size: Any, dtype: Any) -> None:
    if dtype == 1:
        for i in range(size):
            buf[i] = from_bf16(bf16_bits(buf[i]))
    elif dtype == 2:
        for i in range(size):
            buf[i] = from_fp16(fp16_bits(buf[i]))


@inline
def _sum_group(
    wires: Any,
    stride: Any,
    rows: Any,
    nbytes: Any,
    b: Any,
    groups: Any,
    size: Any,
    q: Any,
    buf: Any,
    total: Any,
    dtype: Any,
    spec: Any,
    rotated: Any,
) -> None:
    """Write the sum of group b over all messages, in rank order, into total."""
    for r in range(rows):
        wire = wires[r * stride : r * stride + nbytes]
        _decode_group(wire, b, groups, size, q, buf, spec, rotated)
        _round_to(buf, size, dtype)
        if r == 0:
            total[:] = buf
        else:
            for i in range(size):
                total[i] += buf[i]


@jit
def decode_sum(
    start: Any,
    stop: Any,
    wires: Any,
    stride: Any,
    rows: Any,
    nbytes: Any,
    x: Any,
    groups: Any,
    size: Any,
    spec: Any,
) -> None:
    """Write the fp32 sum of groups start..stop into x."""
    buf = np.empty(size, np.float32)
    total = np.empty(size, np.float32)
    q = np.empty(size, np.uint8)
    for b in range(start, stop):
        count = min(size, x.size - b * size)
        if count <= 0:
            break
        _sum_group(wires, stride, rows, nbytes, b, groups, size, q, buf, total, 0, spec, False)
        store_block(total, count, x, 0, b * size)


@jit
def decode_sum_encode(
    start: Any,
    stop: Any,
    wires: Any,
    stride: Any,
    rows: Any,
    nbytes: Any,
    out: Any,
    groups: Any,
    size: Any,
    spec: Any,
    rotated: Any,
    dtype: Any,
) -> None:
    """Encode the sum of groups start..stop into out; dtype rounds addends and sum."""
    buf = np.empty(size, np.float32)
    total = np.empty(size, np.float32)
    words = total.view(np.int32)
    q = np.empty(size, np.uint8)
    width = _width(spec[0], size)
    for b in range(start, stop):
        _sum_group(
            wires, stride, rows, nbytes, b, groups, size, q, buf, total, dtype, spec, rotated
        )
        _round_to(total, size, dtype)
        s, alpha, ok = _encode_group(total, words, buf, q, size, out, b, spec, rotated)
        _write_fields(out, b, groups, width, s, alpha, ok, spec)
