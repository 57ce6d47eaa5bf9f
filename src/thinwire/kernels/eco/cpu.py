"""ECO's quantizer and step on CPU threads: equals `reference.py` bit for bit.

A row stays in the cache between its update, its largest magnitude, its codes and the injection.
"""

from typing import Any

import numpy as np

from thinwire.kernels.bits import f32, load_block, store_block, u32
from thinwire.kernels.hadamard.cpu import e4m3_bits, e4m3_value
from thinwire.kernels.parallel import inline, jit
from thinwire.kernels.random.cpu import fill_uniform, philox_block

__all__ = ["dequantize", "quantize", "step", "step_absmax", "stochastic_bf16"]

_I32, _U8, _U32, _U64, _F32 = np.int32, np.uint8, np.uint32, np.uint64, np.float32
_FP8, _INT8, _INT4 = 0, 1, 2
_ROUND, _ROUND_BITS = _F32(12582912.0), _I32(0x4B400000)
_ZERO, _ONE, _FLOOR = _F32(0.0), _F32(1.0), _F32(2.0**-100)
_NAN = _F32(np.nan)


@inline
def _magnitude(x: Any, count: Any) -> Any:
    """Return the largest |x| as fp32; NaN and infinity come out as they are."""
    words = x.view(np.int32)
    top = _I32(0)
    for i in range(count):
        top = max(top, _I32(words[i] & _I32(0x7FFFFFFF)))
    return f32(_U32(top))


@inline
def _scale(magnitude: Any, rho: Any, pow2: Any) -> Any:
    if magnitude == _ZERO:
        return _ONE
    scale = max(magnitude / rho, _FLOOR)
    if pow2:
        bits = u32(scale)
        if _U32(bits & _U32(0x7FFFFF)) != _U32(0):
            scale = f32(_U32(_U32(_U32(bits >> _U32(23)) + _U32(1)) << _U32(23)))
    return scale


@inline
def _grid_fp8(y: Any, u: Any) -> Any:
    """Return y within +-448 on E4M3's grid, rounded up where u < the fraction."""
    bits = u32(y)
    a = _U32(bits & _U32(0x7FFFFFFF))
    exponent = max(_I32(_U32(a >> _U32(23))), _I32(121)) - _I32(3)
    gap = f32(_U32(_U32(exponent) << _U32(23)))
    inverse = f32(_U32(_U32(_I32(254) - exponent) << _U32(23)))
    x = f32(a) * inverse
    k = np.floor(x)
    if u < x - k:
        k = k + _ONE
    return f32(_U32(u32(k * gap) | _U32(bits & _U32(0x80000000))))


@inline
def _encode_run(
    x: Any, count: Any, scale: Any, rho: Any, fmt: Any, u: Any, sr: Any, q: Any, out: Any
) -> None:
    """Write one byte per code into q and the dequantized values into out (which may be x)."""
    if fmt == _FP8 and sr:
        for i in range(count):
            y = _grid_fp8(min(max(x[i] / scale, -rho), rho), u[i])
            q[i] = e4m3_bits(y)
            out[i] = y * scale  # the code's own value: y lies on the grid
    elif fmt == _FP8:
        for i in range(count):
            code = e4m3_bits(min(max(x[i] / scale, -rho), rho))
            q[i] = code
            out[i] = e4m3_value(code) * scale
    elif sr:
        for i in range(count):
            y = np.floor(min(max(x[i] / scale, -rho), rho) + u[i])
            y = min(max(y, -rho), rho)
            q[i] = _U8(_I32(y))
            out[i] = y * scale
    else:
        for i in range(count):
            y = _F32(min(max(x[i] / scale, -rho), rho) + _ROUND)
            k = _I32(y.view(np.int32) - _ROUND_BITS)
            q[i] = _U8(k)
            out[i] = _F32(k) * scale


@inline
def _store_codes(q: Any, columns: Any, fmt: Any, row: Any) -> None:
    if fmt == _INT4:
        for j in range(columns // 2):
            row[j] = _U8(_U8(q[2 * j] + 8) & _U8(15)) | _U8(_U8(q[2 * j + 1] + 8) << 4)
        if columns % 2 == 1:
            row[columns // 2] = _U8(_U8(q[columns - 1] + 8) & _U8(15)) | _U8(0x80)
    else:
        for i in range(columns):
            row[_U64(i)] = q[_U64(i)]


@inline
def _load_values(row: Any, columns: Any, fmt: Any, x: Any) -> None:
    """Write the codes of one row as fp32 grid values."""
    if fmt == _FP8:
        for i in range(columns):
            c = row[i]
            x[i] = e4m3_value(c)
            if _U8(c & _U8(0x7F)) == _U8(0x7F):
                x[i] = _NAN
    elif fmt == _INT8:
        signed = row.view(np.int8)
        for i in range(columns):
            x[i] = _F32(_I32(signed[i]))
    else:
        for j in range(columns // 2):
            x[2 * j] = _F32(_I32(_I32(row[j] & _U8(15)) - _I32(8)))
            x[2 * j + 1] = _F32(_I32(_I32(row[j] >> _U8(4)) - _I32(8)))
        if columns % 2 == 1:
            x[columns - 1] = _F32(_I32(_I32(row[columns // 2] & _U8(15)) - _I32(8)))


@inline
def _dequantize_row(
    codes: Any,
    scales: Any,
    r: Any,
    columns: Any,
    width: Any,
    fmt: Any,
    size: Any,
    per_row: Any,
    x: Any,
) -> None:
    _load_values(codes[r * width : (r + 1) * width], columns, fmt, x)
    for j in range(max(per_row, 1)):
        scale = scales[r * per_row + j]
        part = x[j * size : min((j + 1) * size, columns)]
        for i in range(part.size):
            part[i] *= scale


@jit
def dequantize(
    start: Any,
    stop: Any,
    codes: Any,
    scales: Any,
    out: Any,
    dtype: Any,
    columns: Any,
    width: Any,
    fmt: Any,
    size: Any,
    per_row: Any,
) -> None:
    """Write rows start..stop as values (per_row 0: one scale for all)."""
    x = np.empty(columns, np.float32)
    for r in range(start, stop):
        _dequantize_row(codes, scales, r, columns, width, fmt, size, per_row, x)
        store_block(x, columns, out, dtype, r * columns)


@jit
def quantize(
    start: Any,
    stop: Any,
    x: Any,
    dtype: Any,
    codes: Any,
    scales: Any,
    magnitude: Any,
    columns: Any,
    width: Any,
    fmt: Any,
    rho: Any,
    size: Any,
    per_row: Any,
    pow2: Any,
    sr: Any,
    first: Any,
    stride: Any,
    key: Any,
    tensor: Any,
    step: Any,
) -> None:
    """Quantize rows start..stop; per_row 0 takes the one scale from magnitude[0]."""
    buf = np.empty(columns, np.float32)
    u = np.empty(columns if sr else 1, np.float32)
    q = np.empty(columns, np.uint8)
    for r in range(start, stop):
        load_block(x, dtype, r * columns, columns, buf)
        if sr:
            fill_uniform(u, columns, first + r * stride, key, tensor, step)
        for j in range(max(per_row, 1)):
            begin, end = j * size, min((j + 1) * size, columns)
            part = buf[begin:end]
            top = magnitude[0]
            if per_row > 0:
                top = _magnitude(part, part.size)
            scale = _scale(top, rho, pow2)
            _encode_run(
                part, part.size, scale, rho, fmt, u[begin:] if sr else u, sr, q[begin:end], part
            )
            scales[r * per_row + j] = scale
        _store_codes(q, columns, fmt, codes[r * width : (r + 1) * width])


@inline
def _update_row(x: Any, g: Any, m: Any, v: Any, den: Any, columns: Any, h: Any) -> None:
    """Turn th^ into th~, m and v into the step's; den is Adam's denominator."""
    adam, lr, b1, a1, b2, a2, eps, c1, c2, decay, _ = h
    for i in range(columns):
        m[i] = b1 * m[i] + a1 * g[i]
    if adam:
        for i in range(columns):
            v[i] = b2 * v[i] + a2 * (g[i] * g[i])
            den[i] = np.sqrt(v[i] / c2) + eps
            x[i] = decay * x[i] - (lr * (m[i] / c1)) / den[i]
    else:
        for i in range(columns):
            x[i] = decay * x[i] - lr * m[i]


@jit
def step_absmax(
    start: Any,
    stop: Any,
    codes: Any,
    scales: Any,
    g: Any,
    g_dtype: Any,
    m: Any,
    v: Any,
    dtype: Any,
    magnitude: Any,
    columns: Any,
    width: Any,
    fmt: Any,
    size: Any,
    per_row: Any,
    h: Any,
) -> None:
    """Write the magnitudes of th~, one per scale (per_row 0: one per row), changing no state."""
    x, den = np.empty(columns, np.float32), np.empty(columns, np.float32)
    gb, mb, vb = (
        np.empty(columns, np.float32),
        np.empty(columns, np.float32),
        np.empty(columns, np.float32),
    )
    count = max(per_row, 1)
    for r in range(start, stop):
        _dequantize_row(codes, scales, r, columns, width, fmt, size, per_row, x)
        load_block(g, g_dtype, r * columns, columns, gb)
        load_block(m, dtype, r * columns, columns, mb)
        if h[0]:
            load_block(v, dtype, r * columns, columns, vb)
        _update_row(x, gb, mb, vb, den, columns, h)
        for j in range(count):
            part = x[j * size : min((j + 1) * size, columns)]
            magnitude[r * count + j] = _magnitude(part, part.size)


@jit
def step(
    start: Any,
    stop: Any,
    codes: Any,
    scales: Any,
    new_scales: Any,
    g: Any,
    g_dtype: Any,
    m: Any,
    v: Any,
    dtype: Any,
    magnitude: Any,
    columns: Any,
    width: Any,
    fmt: Any,
    rho: Any,
    size: Any,
    per_row: Any,
    pow2: Any,
    h: Any,
    sr: Any,
    first: Any,
    stride: Any,
    key: Any,
    tensor: Any,
    number: Any,
) -> Any:
    """Step rows start..stop in place; return how many scales were left alone as non-finite.

    magnitude is empty where each row finds its own; new_scales may be scales itself except where
    one scale serves all rows.
    """
    x, den = np.empty(columns, np.float32), np.empty(columns, np.float32)
    gb, mb, vb = (
        np.empty(columns, np.float32),
        np.empty(columns, np.float32),
        np.empty(columns, np.float32),
    )
    stored = np.empty(columns, np.float32)
    u = np.empty(columns if sr else 1, np.float32)
    q = np.empty(columns, np.uint8)
    bad = 0
    for r in range(start, stop):
        row = codes[r * width : (r + 1) * width]
        _dequantize_row(codes, scales, r, columns, width, fmt, size, per_row, x)
        load_block(g, g_dtype, r * columns, columns, gb)
        load_block(m, dtype, r * columns, columns, mb)
        if h[0]:
            load_block(v, dtype, r * columns, columns, vb)
        _update_row(x, gb, mb, vb, den, columns, h)
        if sr:
            fill_uniform(u, columns, first + r * stride, key, tensor, number)
        for j in range(max(per_row, 1)):
            begin, end = j * size, min((j + 1) * size, columns)
            count = end - begin
            part = x[begin:end]
            at = r * per_row + j
            top = magnitude[at] if magnitude.size > 0 else _magnitude(part, count)
            if not np.isfinite(top):
                bad += 1
                load_block(m, dtype, r * columns + begin, count, mb[begin:end])
                if h[0]:
                    load_block(v, dtype, r * columns + begin, count, vb[begin:end])
                _restore_codes(row, begin, end, fmt, q)
                continue
            scale = _scale(top, rho, pow2)
            new_scales[at] = scale
            after = stored[begin:end]
            _encode_run(
                part, count, scale, rho, fmt, u[begin:] if sr else u, sr, q[begin:end], after
            )
            _inject(mb[begin:end], part, after, den[begin:end], count, h)
        _store_codes(q, columns, fmt, row)
        store_block(mb, columns, m, dtype, r * columns)
        if h[0]:
            store_block(vb, columns, v, dtype, r * columns)
    return bad


@inline
def _restore_codes(row: Any, begin: Any, end: Any, fmt: Any, q: Any) -> None:
    for i in range(begin, end):
        if fmt == _INT4:
            shift = 4 if i % 2 == 1 else 0
            q[i] = _U8(_U8(_U8(row[i // 2] >> shift) & _U8(15)) - _U8(8))
        else:
            q[i] = row[i]


@inline
def _inject(m: Any, before: Any, after: Any, den: Any, count: Any, h: Any) -> None:
    coefficient = h[10]
    if coefficient != _ZERO:
        if h[0]:
            for i in range(count):
                m[i] += (coefficient * den[i]) * (before[i] - after[i])
        else:
            for i in range(count):
                m[i] += coefficient * (before[i] - after[i])


@jit
def stochastic_bf16(
    start: Any, stop: Any, x: Any, out: Any, size: Any, first: Any, key: Any, tensor: Any, step: Any
) -> None:
    """Round blocks start..stop of fp32 to bf16 patterns, stochastically."""
    for b in range(start, stop):
        for i in range(b * size, min((b + 1) * size, x.size)):
            index = first + i
            w0, w1, w2, w3 = philox_block(np.uint64(index // 4), step, tensor, key)
            k = index % 4
            word = w0 if k == 0 else (w1 if k == 1 else (w2 if k == 2 else w3))
            bits = u32(x[i])
            if _U32(bits & _U32(0x7F800000)) == _U32(0x7F800000):
                nan = _U32(bits & _U32(0x7FFFFF)) != _U32(0)
                out[i] = np.uint16(0x7FC0) if nan else np.uint16(bits >> _U32(16))
            else:
                out[i] = np.uint16(_U32(bits + _U32(word >> _U32(16))) >> _U32(16))
