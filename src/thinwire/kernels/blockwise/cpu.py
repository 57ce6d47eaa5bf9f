"""Block quantization on CPU threads: equals `reference.py` bit for bit.

One block at a time stays in the first-level cache: read, minimum and maximum, codes, packed words.
"""

from typing import Any

import numpy as np

from thinwire.kernels.bits import (
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


@inline
def _to_meta(x: Any, bf16: Any) -> Any:
    return bf16_bits(x) if bf16 else fp16_bits(x)


@inline
def _from_meta(h: Any, bf16: Any) -> Any:
    return from_bf16(h) if bf16 else from_fp16(h)


@inline
def _min_max(buf: Any, count: Any) -> Any:
    """Return minimum and maximum as ordered integers, in which NaN lies outside infinity."""
    lo, hi = _I32(0x7FFFFFFF), _I32(-0x7FFFFFFF)
    words = buf.view(np.int32)
    for i in range(count):
        order = float_order(words[i])
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
    buf: Any, u: Any, q: Any, size: Any, s: Any, z: Any, top: Any, half: Any, sr: Any
) -> None:
    low, high = _F32(-half), _F32(top - half)
    shift = _I32(half) - _ROUND_BITS
    if sr:
        for i in range(size):
            y = np.floor((buf[i] - z) / s + u[i])
            y = min(max(y, low), high)
            q[i] = _U8(_I32(y) + half)
    else:
        for i in range(size):
            y = (buf[i] - z) / s
            y = min(max(y, low), high)
            q[i] = _U8(_I32(_F32(y + _ROUND).view(np.int32)) + shift)


@inline
def _pack(q: Any, size: Any, out: Any, begin: Any, bits: Any) -> None:
    words = q.view(np.uint64)
    for j in range(size // 8):
        w = pack_word(words[j], bits)
        at = begin + j * bits
        if bits == 8:
            store_u64(out, at, w)
        elif bits == 2:
            store_u16(out, at, _U16(w))
        else:
            store_u32(out, at, np.uint32(w))
            if bits == 6:
                store_u16(out, at + 4, _U16(w >> _U64(32)))


@inline
def _unpack(wire: Any, begin: Any, size: Any, q: Any, bits: Any) -> None:
    words = q.view(np.uint64)
    for j in range(size // 8):
        at = begin + j * bits
        if bits == 8:
            w = load_u64(wire, at)
        elif bits == 2:
            w = _U64(load_u16(wire, at))
        else:
            w = _U64(load_u32(wire, at))
            if bits == 6:
                w = w | (_U64(load_u16(wire, at + 4)) << _U64(32))
        words[j] = unpack_word(w, bits)


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
    """Load a block, padded with the last valid value of x (zero when x is empty)."""
    count = max(0, min(size, x.size - begin))
    load_block(x, dtype, begin, count, buf)
    if count < size:
        last = _F32(0.0)
        if x.size > 0:
            load_block(x, dtype, x.size - 1, 1, buf[size - 1 :])
            last = buf[size - 1]
        for i in range(count, size):
            buf[i] = last


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
    buf = np.empty(size, np.float32)
    u = np.empty(size if sr else 1, np.float32)
    q = np.empty(size, np.uint8)
    top = (1 << bits) - 1 if half == 0 else 2 * half
    meta_bytes = 4 if half == 0 else 2
    for b in range(start, stop):
        _fill(x, dtype, b * size, size, buf)
        lo, hi = _min_max(buf, size)
        s, z, ok = _block_meta(lo, hi, top, half, bf16)
        payload, meta = _places(b, blocks, size, bits, meta_bytes, split)
        if ok:
            if sr:
                fill_uniform(u, size, first + b * size, key, tensor, step)
            _codes(buf, u, q, size, _from_meta(s, bf16), _from_meta(z, bf16), top, half, sr)
        else:
            s = _U16(0)
            z = _to_meta(_NAN, bf16)
            if half > 0:
                s = z
            q[:] = 0
        _pack(q, size, out, payload, bits)
        store_u16(out, meta, s)
        if half == 0:
            store_u16(out, meta + 2, z)


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
    buf = np.empty(size, np.float32)
    q = np.empty(size, np.uint8)
    top = (1 << bits) - 1 if half == 0 else 2 * half
    meta_bytes = 4 if half == 0 else 2
    for b in range(start, stop):
        begin = b * size
        count = min(size, x.size - begin)
        if count <= 0:
            break
        payload, meta = _places(b, blocks, size, bits, meta_bytes, split)
        s = _from_meta(load_u16(wire, meta), bf16)
        z = _F32(0.0)
        if half == 0:
            z = _from_meta(load_u16(wire, meta + 2), bf16)
        if not np.isfinite(z + s * _F32(top)):
            z = _NAN
            s = _F32(0.0)
        _unpack(wire, payload, size, q, bits)
        shift = _I32(half)
        if dtype == 0:
            part = x[begin : begin + count]
            if accumulate:
                for i in range(count):
                    part[i] += z + s * _F32(_I32(_I32(q[i]) - shift))
            else:
                for i in range(count):
                    part[i] = z + s * _F32(_I32(_I32(q[i]) - shift))
        else:
            for i in range(count):
                buf[i] = z + s * _F32(_I32(_I32(q[i]) - shift))
            store_block(buf, count, x, dtype, begin)
