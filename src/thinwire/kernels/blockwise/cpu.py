"""Block quantization on CPU threads: equals `reference.py` bit for bit.

A panel of blocks at a time stays in the first-level cache: read, minima and maxima, codes, packed
words, each step one SIMD loop.
"""

from typing import Any

import numpy as np

from thinwire.kernels.bits import (
    add_block,
    bf16_bits,
    f32,
    float_order,
    fp16_bits,
    from_bf16,
    from_fp16,
    load_block,
    load_u16,
    load_u32,
    load_u64,
    pack_word,
    store_block,
    store_u16,
    store_u32,
    store_u64,
    unpack_word,
)
from thinwire.kernels.parallel import inline, jit
from thinwire.kernels.random.cpu import fill_uniform

__all__ = ["decode", "encode"]

_I32, _U8, _U16, _U64, _F32 = np.int32, np.uint8, np.uint16, np.uint64, np.float32
_INF_ORDER = _I32(0x7F800000)
# 1.5 * 2^23: adding it leaves a small float rounded, ties to even, in the low bits.
_ROUND = _F32(12582912.0)
_ROUND_BITS = _I32(0x4B400000)
_NAN = _F32(np.nan)
# Elements worked on at a time: they stay in the first-level cache, and small blocks share loops.
_PANEL = 2048
# The smallest block; loops of a fixed length become SIMD code without remainders.
_LANES = 32


@inline
def _to_meta(x: Any, bf16: Any) -> Any:
    return bf16_bits(x) if bf16 else fp16_bits(x)


@inline
def _from_meta(h: Any, bf16: Any) -> Any:
    return from_bf16(h) if bf16 else from_fp16(h)


@inline
def _min_max(words: Any, begin: Any, count: Any) -> Any:
    """Return minimum and maximum as ordered integers, in which NaN lies outside infinity."""
    lo, hi = _I32(0x7FFFFFFF), _I32(-0x7FFFFFFF)
    for i in range(begin, begin + count):
        order = float_order(words[_U64(i)])
        lo = min(lo, order)
        hi = max(hi, order)
    return lo, hi


@inline
def _block_meta(lo: Any, hi: Any, top: Any, half: Any, bf16: Any) -> Any:
    """Return the 16-bit scale and minimum and whether the block can be coded."""
    if hi >= _INF_ORDER or lo < float_order(_I32(-0x00800000)) + _I32(1):
        return _U16(0), _U16(0), False
    x_lo = f32(float_order(lo)) + _F32(0.0)
    x_hi = f32(float_order(hi)) + _F32(0.0)
    z = _U16(0)
    levels = _F32(top)
    if half > 0:
        x_hi = max(abs(x_lo), abs(x_hi))
        levels = _F32(top - half)
    else:
        z = _to_meta(x_lo, bf16)
        if z == _U16(0x8000):  # minus zero is stored as zero
            z = _U16(0)
    minimum = _from_meta(z, bf16)
    s = _to_meta((x_hi - minimum) / levels, bf16)
    if levels * _from_meta(s, bf16) + minimum < x_hi:
        s = _U16(s + 1)
    scale = _from_meta(s, bf16)
    if scale <= _F32(0.0):
        s = _U16(1)
    largest = _from_meta(_to_meta(x_hi, bf16), bf16)
    ok = np.isfinite(minimum) and np.isfinite(scale) and np.isfinite(largest)
    return s, z, ok


@inline
def _codes(
    buf: Any, u: Any, q: Any, begin: Any, size: Any, s: Any, z: Any, top: Any, half: Any, sr: Any
) -> None:
    low, high = _F32(-half), _F32(top - half)
    shift = _I32(half) - _ROUND_BITS
    for c in range(begin, begin + size, _LANES):
        if sr:
            for i in range(_LANES):
                y = np.floor((buf[_U64(c + i)] - z) / s + u[_U64(c + i)])
                y = min(max(y, low), high)
                q[_U64(c + i)] = _U8(_I32(y) + half)
        else:
            for i in range(_LANES):
                y = (buf[_U64(c + i)] - z) / s
                y = min(max(y, low), high)
                q[_U64(c + i)] = _U8(_I32(_F32(y + _ROUND).view(np.int32)) + shift)


@inline
def _pack(words: Any, first: Any, count: Any, out: Any, begin: Any, bits: Any) -> None:
    """Write `count` words of 8 packed codes each; squeezed first, so that it is SIMD code."""
    if bits == 8:
        for j in range(count):
            store_u64(out, begin + j * 8, words[_U64(first + j)])
        return
    for j in range(first, first + count):
        words[_U64(j)] = pack_word(words[_U64(j)], bits)
    if bits == 4:
        for j in range(count):
            store_u32(out, begin + j * 4, np.uint32(words[_U64(first + j)]))
    elif bits == 2:
        for j in range(count):
            store_u16(out, begin + j * 2, _U16(words[_U64(first + j)]))
    else:
        # Two bytes too many per word, overwritten by the next; the last word ends exactly.
        for j in range(count - 1):
            store_u64(out, begin + j * 6, words[_U64(first + j)])
        last = words[_U64(first + count - 1)]
        store_u32(out, begin + count * 6 - 6, np.uint32(last))
        store_u16(out, begin + count * 6 - 2, _U16(last >> _U64(32)))


@inline
def _unpack(wire: Any, begin: Any, words: Any, first: Any, count: Any, bits: Any) -> None:
    """Read `count` words of 8 codes each: inverts `_pack`."""
    if bits == 8:
        for j in range(count):
            words[_U64(first + j)] = load_u64(wire, begin + j * 8)
        return
    if bits == 4:
        for j in range(count):
            words[_U64(first + j)] = _U64(load_u32(wire, begin + j * 4))
    elif bits == 2:
        for j in range(count):
            words[_U64(first + j)] = _U64(load_u16(wire, begin + j * 2))
    else:
        for j in range(count):
            at = begin + j * 6
            high = _U64(load_u16(wire, at + 4)) << _U64(32)
            words[_U64(first + j)] = _U64(load_u32(wire, at)) | high
    for j in range(first, first + count):
        words[_U64(j)] = unpack_word(words[_U64(j)], bits)


@inline
def _places(b: Any, blocks: Any, size: Any, bits: Any, meta_bytes: Any, split: Any) -> Any:
    """Return the byte offsets of a block's payload and metadata."""
    width = size * bits // 8
    if split:
        return b * width, blocks * width + b * meta_bytes
    begin = b * (width + meta_bytes)
    return begin, begin + width


@inline
def _fill(x: Any, dtype: Any, begin: Any, size: Any, buf: Any) -> None:
    """Load a panel, padded with the last valid value of x (zero when x is empty)."""
    count = max(0, min(size, x.size - begin))
    load_block(x, dtype, begin, count, buf)
    if count < size:
        last = _F32(0.0)
        if x.size > 0:
            load_block(x, dtype, x.size - 1, 1, buf[size - 1 :])
            last = buf[size - 1]
        for i in range(count, size):
            buf[i] = last


@inline
def _metas(
    words: Any, count: Any, size: Any, top: Any, half: Any, bf16: Any, ends: Any, meta: Any,
    good: Any,
) -> None:  # fmt: skip
    """Write scale and minimum of each block of a panel, and whether it can be coded."""
    for i in range(count):
        ends[0, i], ends[1, i] = _min_max(words, i * size, size)
    nan = _to_meta(_NAN, bf16)
    for i in range(count):
        s, z, ok = _block_meta(ends[0, i], ends[1, i], top, half, bf16)
        if not ok:
            s, z = nan if half > 0 else _U16(0), nan
        meta[0, i], meta[1, i], good[i] = s, z, ok


@jit
def encode(
    start: Any,
    stop: Any,
    x: Any,
    dtype: Any,
    out: Any,
    blocks: Any,
    size: Any,
    bits: Any,
    split: Any,
    bf16: Any,
    half: Any,
    sr: Any,
    first: Any,
    key: Any,
    tensor: Any,
    step: Any,
) -> None:
    """Encode blocks start..stop of x into out; half > 0 is the symmetric arm."""
    per = max(1, _PANEL // size)
    buf = np.empty(per * size, np.float32)
    words = buf.view(np.int32)
    u = np.empty(per * size if sr else 1, np.float32)
    q = np.empty(per * size, np.uint8)
    packed = q.view(np.uint64)
    ends = np.empty((2, per), np.int32)
    meta = np.empty((2, per), np.uint16)
    good = np.empty(per, np.uint8)
    top = (1 << bits) - 1 if half == 0 else 2 * half
    meta_bytes = 4 if half == 0 else 2
    for b in range(start, stop, per):
        count = min(per, stop - b)
        _fill(x, dtype, b * size, count * size, buf)
        if sr:
            fill_uniform(u, count * size, first + b * size, key, tensor, step)
        _metas(words, count, size, top, half, bf16, ends, meta, good)
        for i in range(count):
            if good[i]:
                s, z = _from_meta(meta[0, i], bf16), _from_meta(meta[1, i], bf16)
                _codes(buf, u, q, i * size, size, s, z, top, half, sr)
            else:
                q[i * size : (i + 1) * size] = 0
        if split:
            _pack(packed, 0, count * size // 8, out, b * size * bits // 8, bits)
        for i in range(count):
            payload, tail = _places(b + i, blocks, size, bits, meta_bytes, split)
            if not split:
                _pack(packed, i * size // 8, size // 8, out, payload, bits)
            store_u16(out, tail, meta[0, i])
            if half == 0:
                store_u16(out, tail + 2, meta[1, i])


@inline
def _read_meta(wire: Any, tail: Any, top: Any, half: Any, bf16: Any) -> Any:
    """Return scale and minimum; (0, NaN) for a block whose top value is not finite."""
    s = _from_meta(load_u16(wire, tail), bf16)
    z = _F32(0.0)
    if half == 0:
        z = _from_meta(load_u16(wire, tail + 2), bf16)
    if not np.isfinite(z + s * _F32(top)):
        return _F32(0.0), _NAN
    return s, z


@inline
def _values(q: Any, begin: Any, size: Any, s: Any, z: Any, shift: Any, buf: Any) -> None:
    for i in range(begin, begin + size):
        buf[_U64(i)] = z + s * _F32(_I32(_I32(q[_U64(i)]) - shift))


@jit
def decode(
    start: Any,
    stop: Any,
    wire: Any,
    x: Any,
    dtype: Any,
    blocks: Any,
    size: Any,
    bits: Any,
    split: Any,
    bf16: Any,
    half: Any,
    accumulate: Any,
) -> None:
    """Decode blocks start..stop into x, or add them to x (fp32)."""
    per = max(1, _PANEL // size)
    buf = np.empty(per * size, np.float32)
    q = np.empty(per * size, np.uint8)
    packed = q.view(np.uint64)
    top = (1 << bits) - 1 if half == 0 else 2 * half
    meta_bytes = 4 if half == 0 else 2
    shift = _I32(half)
    for b in range(start, min(stop, -(-x.size // size)), per):
        count = min(per, stop - b)
        if split:
            _unpack(wire, b * size * bits // 8, packed, 0, count * size // 8, bits)
        for i in range(count):
            payload, tail = _places(b + i, blocks, size, bits, meta_bytes, split)
            if not split:
                _unpack(wire, payload, packed, i * size // 8, size // 8, bits)
            s, z = _read_meta(wire, tail, top, half, bf16)
            _values(q, i * size, size, s, z, shift, buf)
        begin = b * size
        number = min(count * size, x.size - begin)
        if accumulate:
            add_block(buf, number, x, dtype, begin)
        else:
            store_block(buf, number, x, dtype, begin)
