"""Chunked top-k on CPU threads: equals `reference.py` bit for bit.

A chunk's 4096 values stay in the first-level cache between load, selection (`select`) and codes.
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
    load_u16,
    load_u32,
    store_block,
    store_u16,
    store_u32,
    u32,
)
from thinwire.kernels.parallel import inline, jit
from thinwire.kernels.topk.select import select

__all__ = ["add", "decode", "encode", "entries", "paper_codes", "paper_residual"]

_I32, _U8, _U16, _U32, _F32, _F64 = (
    np.int32, np.uint8, np.uint16, np.uint32, np.float32, np.float64,
)  # fmt: skip
_SYM, _PAPER, _NONE = 0, 1, 2
_NAN, _ZERO, _HALF = _F32(np.nan), _F32(0.0), _F32(0.5)


@inline
def _load_chunk(
    x: Any, dtype: Any, base: Any, height: Any, width: Any, pitch: Any, buf: Any
) -> None:
    for row in range(height):
        load_block(x, dtype, base + row * pitch, width, buf[row * width :])


@inline
def _index(cell: Any, width: Any, tile_width: Any) -> Any:
    """Return a cell's place in a whole tile."""
    if width == tile_width:
        return _U32(cell)
    return _U32((cell // width) * tile_width + cell % width)


@inline
def _store_indices(cells: Any, k: Any, width: Any, tile_width: Any, wire: Any, at: Any) -> None:
    for j in range(0, k, 2):
        a = _index(cells[j], width, tile_width)
        byte = at + 3 * (j // 2)
        wire[byte] = _U8(a)
        if j + 1 < k:
            b = _index(cells[j + 1], width, tile_width)
            wire[byte + 1] = _U8(_U32(a >> _U32(8)) | _U32(_U32(b & _U32(15)) << _U32(4)))
            wire[byte + 2] = _U8(b >> _U32(4))
        else:
            wire[byte + 1] = _U8(a >> _U32(8))


@inline
def _store_codes(codes: Any, k: Any, wire: Any, at: Any) -> None:
    for q in range((k + 3) // 4):
        byte = _U8(0)
        for i in range(min(4, k - 4 * q)):
            byte = _U8(byte | _U8(codes[4 * q + i] << (2 * i)))
        wire[at + q] = byte


@inline
def _level_bits(x: Any, bf16: Any) -> Any:
    return bf16_bits(x) if bf16 else fp16_bits(x)


@inline
def _level_value(h: Any, bf16: Any) -> Any:
    return from_bf16(h) if bf16 else from_fp16(h)


@inline
def _two_levels(v: Any, k: Any) -> Any:
    """Return lo, hi and the final threshold of |v[:k]|."""
    total = _F64(0.0)
    for i in range(k):
        total += _F64(abs(v[i]))
    thr = _F32(total / k)
    lo = hi = thr
    for _ in range(3):
        above, below, high = _F64(0.0), _F64(0.0), 0
        for i in range(k):
            # No branch: half of them would be mispredicted.
            a = _F64(abs(v[i]))
            over = abs(v[i]) > thr
            above += a if over else _F64(0.0)
            below += _F64(0.0) if over else a
            high += 1 if over else 0
        hi = _F32(above / high) if high > 0 else _ZERO
        lo = _F32(below / (k - high)) if high < k else _ZERO
        thr = _F32(lo + hi) * _HALF
    return lo, hi, thr


@inline
def _sym_chunk(
    v: Any, k: Any, flagged: Any, codes: Any, wire: Any, head: Any, code_at: Any, bf16: Any
) -> None:
    """Write levels and codes of one chunk; leave the values as they will be decoded in v."""
    lo_bits = hi_bits = _level_bits(_NAN, bf16)
    thr = _ZERO
    if not flagged:
        lo, hi, thr = _two_levels(v, k)
        a, b = _level_bits(lo, bf16), _level_bits(hi, bf16)
        if np.isfinite(_level_value(a, bf16)) and np.isfinite(_level_value(b, bf16)):
            lo_bits, hi_bits = a, b
        else:
            flagged = True
    lo, hi = _level_value(lo_bits, bf16), _level_value(hi_bits, bf16)
    for i in range(k):
        mag = abs(v[i]) > thr
        negative = v[i] < _ZERO
        codes[i] = _U8(0) if flagged else _U8((1 if negative else 0) + (2 if mag else 0))
        value = hi if mag else lo
        v[i] = -value if negative else value
    if flagged:
        v[:k] = _NAN
    store_u16(wire, head, lo_bits)
    store_u16(wire, head + 2, hi_bits)
    _store_codes(codes, k, wire, code_at)


@inline
def _store_rest(
    buf: Any,
    cells: Any,
    v: Any,
    k: Any,
    residual: Any,
    base: Any,
    height: Any,
    width: Any,
    pitch: Any,
) -> None:
    """Write a chunk, less the first k values sent, to the residual."""
    for j in range(k):
        buf[cells[j]] -= v[j]
    for row in range(height):
        store_block(buf[row * width :], width, residual, 0, base + row * pitch)


@jit
def encode(
    start: Any,
    stop: Any,
    x: Any,
    dtype: Any,
    residual: Any,
    new_residual: Any,
    beta: Any,
    feedback: Any,
    wire: Any,
    kept: Any,
    quant: Any,
    bf16: Any,
    head_bytes: Any,
    index_bytes: Any,
    base: Any,
    height: Any,
    width: Any,
    k: Any,
    first: Any,
    index_at: Any,
    code_at: Any,
    pitch: Any,
    tile_width: Any,
    most: Any,
) -> None:
    """Encode chunks start..stop into wire.

    With `feedback`, values are beta*residual + x and what is not sent goes to new_residual.
    Under `paper` the kept values go to `kept` and codes follow in `paper_codes`.
    """
    cells_max = 1
    for c in range(start, stop):
        cells_max = max(cells_max, height[c] * width[c])
    buf, old = np.empty(cells_max, np.float32), np.empty(cells_max, np.float32)
    words = buf.view(np.int32)
    keys, ties = np.empty(cells_max, np.int32), np.empty(cells_max + 1, np.int32)
    hist = np.empty(2048, np.int32)
    cells = np.empty(cells_max + 1, np.int64)
    v, codes = np.empty(most, np.float32), np.empty(most, np.uint8)
    for c in range(start, stop):
        w, count, kc = width[c], height[c] * width[c], k[c]
        _load_chunk(x, dtype, base[c], height[c], w, pitch, buf)
        if feedback:
            _load_chunk(residual, 0, base[c], height[c], w, pitch, old)
            for i in range(count):
                buf[i] = beta * old[i] + buf[i]
        flagged = select(words, count, kc, keys, ties, hist, cells)
        for j in range(kc):
            v[j] = _NAN if flagged else buf[cells[j]]
        _store_indices(cells, kc, w, tile_width, wire, head_bytes + index_at[c])
        values = head_bytes + index_bytes
        if quant == _SYM:
            _sym_chunk(v, kc, flagged, codes, wire, 4 * c, values + code_at[c], bf16)
        elif quant == _NONE:
            for j in range(kc):
                store_u32(wire, values + 4 * (first[c] + j), u32(v[j]))
        else:
            kept[first[c] : first[c] + kc] = v[:kc]
        if feedback:
            _store_rest(
                buf,
                cells,
                v,
                0 if quant == _PAPER else kc,
                new_residual,
                base[c],
                height[c],
                w,
                pitch,
            )


@inline
def _paper_step(v: Any) -> Any:
    """Return the mean and the bin width of all kept values."""
    n = v.size
    total = _F64(0.0)
    for i in range(n):
        total += _F64(v[i])
    mu = _F32(total / n)
    if n == 1:
        return mu, _F32(1.0)
    total = _F64(0.0)
    for i in range(n):
        total += _F64(_F32(v[i] - mu))
    center = total / n
    square = _F64(0.0)
    for i in range(n):
        d = _F64(_F32(v[i] - mu)) - center
        square += d * d
    sigma = _F32(np.sqrt(square / (n - 1)))
    step = _F32(_F32(6.0) * sigma) / _F32(4.0)
    if not np.isfinite(step) or step <= _ZERO:
        step = _F32(1.0)
    return mu, step


@jit
def paper_codes(
    start: Any,
    stop: Any,
    v: Any,
    wire: Any,
    head_bytes: Any,
    index_bytes: Any,
    k: Any,
    first: Any,
    code_at: Any,
    most: Any,
) -> None:
    """Write mean, table and codes of all kept values v, and the decoded values over v."""
    n = v.size
    mu, step = _paper_step(v)
    sums = np.zeros(4, np.float64)
    counts = np.zeros(4, np.int64)
    codes = np.empty(n, np.uint8)
    for i in range(n):
        c = v[i] - mu
        y = np.rint(_F32(_F32(c / step) + _F32(2.0)))
        code = int(min(y, _F32(3.0))) if y > _ZERO else 0
        codes[i] = code
        if not np.isnan(y):
            sums[code] += c
            counts[code] += 1
    store_u32(wire, 0, u32(mu))
    table = np.zeros(4, np.float32)
    for j in range(4):
        if counts[j] > 0:
            table[j] = _F32(sums[j] / counts[j])
        store_u32(wire, 4 + 4 * j, u32(table[j]))
    for c in range(k.size):
        _store_codes(codes[first[c] :], k[c], wire, head_bytes + index_bytes + code_at[c])
    for i in range(n):
        v[i] = mu + table[codes[i]]


@inline
def _load_index(wire: Any, at: Any, j: Any) -> Any:
    byte = at + 3 * (j // 2)
    if j % 2 == 0:
        return (np.int64(wire[byte])) | ((np.int64(wire[byte + 1]) & 15) << 8)
    return (np.int64(wire[byte + 1]) >> 4) | (np.int64(wire[byte + 2]) << 4)


@jit
def paper_residual(
    start: Any,
    stop: Any,
    wire: Any,
    v: Any,
    residual: Any,
    head_bytes: Any,
    base: Any,
    k: Any,
    first: Any,
    index_at: Any,
    pitch: Any,
    tile_width: Any,
) -> None:
    """Subtract the decoded values v from the residual of chunks start..stop."""
    for c in range(start, stop):
        for j in range(k[c]):
            i = _load_index(wire, head_bytes + index_at[c], j)
            residual[base[c] + (i // tile_width) * pitch + i % tile_width] -= v[first[c] + j]


@inline
def _value(wire: Any, c: Any, j: Any, quant: Any, bf16: Any, codes: Any, values: Any) -> Any:
    """Return entry j of chunk c; `codes` and `values` are byte offsets of its codes and values."""
    if quant == _NONE:
        return f32(load_u32(wire, values + 4 * j))
    code = (wire[codes + j // 4] >> (2 * (j % 4))) & 3
    if quant == _PAPER:
        return f32(load_u32(wire, 0)) + f32(load_u32(wire, 4 + 4 * code))
    level = _level_value(load_u16(wire, 4 * c + 2 * (code >> 1)), bf16)
    return -level if code & 1 else level


@inline
def _chunk_entries(
    wire: Any,
    c: Any,
    quant: Any,
    bf16: Any,
    head_bytes: Any,
    index_bytes: Any,
    height: Any,
    width: Any,
    k: Any,
    first: Any,
    index_at: Any,
    code_at: Any,
    tile_width: Any,
    cells: Any,
    v: Any,
) -> Any:
    """Write cells (row*width + column) and values; return False for indices that cannot be."""
    last = -1
    good = True
    codes = head_bytes + index_bytes + code_at
    values = head_bytes + index_bytes + 4 * first
    for j in range(k):
        i = _load_index(wire, head_bytes + index_at, j)
        row, column = i // tile_width, i % tile_width
        good = good and i > last and row < height and column < width
        last = i
        cells[j] = row * width + column
        v[j] = _value(wire, c, j, quant, bf16, codes, values)
    return good


@jit
def decode(
    start: Any,
    stop: Any,
    wire: Any,
    out: Any,
    dtype: Any,
    quant: Any,
    bf16: Any,
    head_bytes: Any,
    index_bytes: Any,
    base: Any,
    height: Any,
    width: Any,
    k: Any,
    first: Any,
    index_at: Any,
    code_at: Any,
    pitch: Any,
    tile_width: Any,
    most: Any,
) -> Any:
    """Write chunks start..stop into out; return how many have indices that cannot be."""
    cells_max = 1
    for c in range(start, stop):
        cells_max = max(cells_max, height[c] * width[c])
    buf = np.zeros(cells_max, np.float32)
    cells, v = np.empty(most, np.int64), np.empty(most, np.float32)
    bad = 0
    for c in range(start, stop):
        w, kc = width[c], k[c]
        good = _chunk_entries(
            wire,
            c,
            quant,
            bf16,
            head_bytes,
            index_bytes,
            height[c],
            w,
            kc,
            first[c],
            index_at[c],
            code_at[c],
            tile_width,
            cells,
            v,
        )
        if not good:
            bad += 1
            continue
        for j in range(kc):
            buf[cells[j]] = v[j]
        for row in range(height[c]):
            store_block(buf[row * w :], w, out, dtype, base[c] + row * pitch)
        for j in range(kc):
            buf[cells[j]] = _ZERO
    return bad


@jit
def add(
    start: Any,
    stop: Any,
    wire: Any,
    out: Any,
    quant: Any,
    bf16: Any,
    head_bytes: Any,
    index_bytes: Any,
    base: Any,
    height: Any,
    width: Any,
    k: Any,
    first: Any,
    index_at: Any,
    code_at: Any,
    pitch: Any,
    tile_width: Any,
    most: Any,
) -> Any:
    """Add chunks start..stop to fp32 out; return how many have indices that cannot be."""
    cells, v = np.empty(most, np.int64), np.empty(most, np.float32)
    bad = 0
    for c in range(start, stop):
        w, kc = width[c], k[c]
        good = _chunk_entries(
            wire,
            c,
            quant,
            bf16,
            head_bytes,
            index_bytes,
            height[c],
            w,
            kc,
            first[c],
            index_at[c],
            code_at[c],
            tile_width,
            cells,
            v,
        )
        if not good:
            bad += 1
            continue
        for j in range(kc):
            out[base[c] + (cells[j] // w) * pitch + cells[j] % w] += v[j]
    return bad


@jit
def entries(
    start: Any,
    stop: Any,
    wire: Any,
    position: Any,
    value: Any,
    quant: Any,
    bf16: Any,
    head_bytes: Any,
    index_bytes: Any,
    base: Any,
    height: Any,
    width: Any,
    k: Any,
    first: Any,
    index_at: Any,
    code_at: Any,
    pitch: Any,
    tile_width: Any,
    most: Any,
) -> Any:
    """List flat positions and values of chunks start..stop; return how many cannot be."""
    cells, v = np.empty(most, np.int64), np.empty(most, np.float32)
    bad = 0
    for c in range(start, stop):
        w, kc = width[c], k[c]
        good = _chunk_entries(
            wire,
            c,
            quant,
            bf16,
            head_bytes,
            index_bytes,
            height[c],
            w,
            kc,
            first[c],
            index_at[c],
            code_at[c],
            tile_width,
            cells,
            v,
        )
        if not good:
            bad += 1
            continue
        for j in range(kc):
            position[first[c] + j] = base[c] + (cells[j] // w) * pitch + cells[j] % w
            value[first[c] + j] = v[j]
    return bad
