"""ECO's quantizer and step on CUDA: equals `reference.py` bit for bit.

Legend: a segment is a run of elements that share a scale (a row, or a group of one); a tile is
[SEG, P], SEG segments of P elements. Segments up to 8192 elements (4096 where FP8 is emulated) stay
in registers from load to store, so that a step reads and writes each tensor once; longer ones are
read twice, for their largest magnitude and for the step. One scale for the whole tensor takes its
magnitude as given.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.device import (
    RANDOM,
    floor_int,
    fp8_code,
    fp8_value,
    grid,
    has_fp8,
    largest_bits,
    launch,
    narrow,
    pattern,
    random_words,
    round_even,
    store_tile,
    tile_rows,
    uniform_tile,
    widen,
    word_tile,
)
from thinwire.kernels.eco.reference import RHO, Quantizer, Step, code_columns, num_scales
from thinwire.kernels.random import RandomKey

__all__ = ["dequantize", "quantize", "step", "step_absmax", "stochastic_bf16"]

_FORMAT_CODES = {"fp8_e4m3": 0, "int8": 1, "int4": 2}
_HALF = 4096  # half of the longest segment that stays in registers
_BLOCK = 2048
_CONSTANTS = ["per_row", "tiles", "segments"]
_RANDOM = ["stride", *RANDOM]


@triton.jit
def _segments(per_row, size, SEG: tl.constexpr):
    """Return this program's segments int64 [SEG], their rows and first columns."""
    s = tl.program_id(0).to(tl.int64) * SEG + tl.arange(0, SEG)
    return s, s // per_row, (s % per_row) * size


@triton.jit
def _tile(t, row, first, columns, size, known, P: tl.constexpr):
    """Return flat indices [SEG, P] of tile t of each segment and which of them are elements."""
    p = t * P + tl.arange(0, P)[None, :]
    column = first[:, None] + p
    valid = (p < size) & (column < columns) & known[:, None]
    return row[:, None] * columns + column, valid


@triton.jit
def _load_grid(codes_ptr, at, first, valid, t, SEG: tl.constexpr, P: tl.constexpr,
               FMT: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Return codes as values on the grid, fp32 [SEG, P]; rows of codes begin at `at` [SEG]."""
    if FMT == 2:
        even, _ = tl.split(tl.reshape(valid.to(tl.int32), [SEG, P // 2, 2]))
        byte_at = (at + first // 2)[:, None] + t * (P // 2) + tl.arange(0, P // 2)[None, :]
        byte = tl.load(codes_ptr + byte_at, mask=even > 0, other=0).to(tl.int32)
        nibble = (byte[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 15
        x = (tl.reshape(nibble, [SEG, P]) - 8).to(tl.float32)
    else:
        byte_at = (at + first)[:, None] + t * P + tl.arange(0, P)[None, :]
        c = tl.load(codes_ptr + byte_at, mask=valid, other=0).to(tl.int32)
        if FMT == 1:
            x = c.to(tl.int8).to(tl.float32)
        else:
            x = tl.where((c & 0x7F) == 0x7F, float("nan"), fp8_value(c, True, NATIVE))
    return x


@triton.jit
def _store_grid(codes_ptr, at, first, valid, t, q, SEG: tl.constexpr, P: tl.constexpr,
                FMT: tl.constexpr):  # fmt: skip
    """Store codes int32 [SEG, P] of the valid elements; an odd row's last nibble is a zero."""
    if FMT == 2:
        nibble = tl.where(valid, q, 0) + 8
        pairs = tl.reshape(nibble, [SEG, P // 2, 2])
        byte = tl.sum(pairs << (4 * tl.arange(0, 2))[None, None, :], 2)
        even, _ = tl.split(tl.reshape(valid.to(tl.int32), [SEG, P // 2, 2]))
        byte_at = (at + first // 2)[:, None] + t * (P // 2) + tl.arange(0, P // 2)[None, :]
        tl.store(codes_ptr + byte_at, byte.to(tl.uint8), mask=even > 0)
    else:
        byte_at = (at + first)[:, None] + t * P + tl.arange(0, P)[None, :]
        tl.store(codes_ptr + byte_at, q.to(tl.uint8), mask=valid)


@triton.jit
def _scale(top, RHO_: tl.constexpr, POW2: tl.constexpr):
    """Return the scales of largest magnitudes fp32."""
    scale = tl.maximum(tl.div_rn(top, RHO_), 2.0**-100)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        up = (((bits >> 23) + 1) << 23).to(tl.float32, bitcast=True)
        scale = tl.where((bits & 0x7FFFFF) != 0, up, scale)
    return tl.where(top == 0, 1.0, scale)


@triton.jit
def _stochastic_fp8(y, u):
    """Return y within +-448 on E4M3's grid, away from zero where u is below the fraction."""
    bits = y.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    exponent = tl.maximum(a >> 23, 121) - 3
    gap = (exponent << 23).to(tl.float32, bitcast=True)
    x = a.to(tl.float32, bitcast=True) * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    k = x.to(tl.int32).to(tl.float32)  # x is not negative: truncated is the floor
    k = tl.where(u < x - k, k + 1.0, k)
    sign = bits & -0x80000000
    return ((k * gap).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x, scale, u, RHO_: tl.constexpr, FMT: tl.constexpr, SR: tl.constexpr,
             NATIVE: tl.constexpr):  # fmt: skip
    """Return codes int32 and dequantized values fp32 of x [SEG, P] with scales [SEG, 1]."""
    y = tl.minimum(tl.maximum(tl.div_rn(x, scale), -RHO_), RHO_)
    if FMT == 0:
        if SR:
            y = _stochastic_fp8(y, u)
        q = fp8_code(y, True, NATIVE)
        value = fp8_value(q, True, NATIVE)
    else:
        LIMIT: tl.constexpr = 127 if FMT == 1 else 7
        if SR:
            q = tl.minimum(tl.maximum(floor_int(y + u), -LIMIT), LIMIT)
        else:
            q = round_even(y)
        value = q.to(tl.float32)
    return q, value * scale


@triton.jit
def _uniforms(row, first, t, offset, stride, key_low, key_high, tensor, number,
              SEG: tl.constexpr, P: tl.constexpr, SR: tl.constexpr,
              ALIGNED: tl.constexpr):  # fmt: skip
    """Return the uniforms of one tile, or 0 where nothing is stochastic."""
    if SR:
        start = (offset + row * stride + first)[:, None] + t * P
        u = uniform_tile(start, SEG, P, ALIGNED, key_low, key_high, tensor, number)
    else:
        u = 0.0
    return u


@triton.jit
def _update(codes_ptr, g_ptr, m_ptr, v_ptr, index, code_row, first, valid, scale, t, lr, b1, a1,
            b2, a2, eps, c1, c2, decay, SEG: tl.constexpr, P: tl.constexpr, FMT: tl.constexpr,
            ADAM: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Return th~, m~, v and den of one tile (see `reference.adam_update`)."""
    x = _load_grid(codes_ptr, code_row, first, valid, t, SEG, P, FMT, NATIVE) * scale
    g = widen(tl.load(g_ptr + index, mask=valid, other=0))
    m = b1 * widen(tl.load(m_ptr + index, mask=valid, other=0)) + a1 * g
    if ADAM:
        v = b2 * widen(tl.load(v_ptr + index, mask=valid, other=0)) + a2 * (g * g)
        den = tl.sqrt_rn(tl.div_rn(v, c2)) + eps
        x = decay * x - tl.div_rn(lr * tl.div_rn(m, c1), den)
    else:
        v = m
        den = m
        x = decay * x - lr * m
    return tl.where(valid, x, 0.0), m, v, den


@triton.jit
def _finish(codes_ptr, m_ptr, v_ptr, index, code_row, first, valid, scale, t, x, m, v, den, u,
            inject, SEG: tl.constexpr, P: tl.constexpr, FMT: tl.constexpr, RHO_: tl.constexpr,
            ADAM: tl.constexpr, INJECT: tl.constexpr, SR: tl.constexpr,
            NATIVE: tl.constexpr):  # fmt: skip
    """Round th~, put the error into the moment and store one tile."""
    q, value = _rounded(x, scale, u, RHO_, FMT, SR, NATIVE)
    if INJECT:
        if ADAM:
            m = m + (inject * den) * (x - value)
        else:
            m = m + inject * (x - value)
    _store_grid(codes_ptr, code_row, first, valid, t, q, SEG, P, FMT)
    tl.store(m_ptr + index, narrow(m, m_ptr.dtype.element_ty), mask=valid)
    if ADAM:
        tl.store(v_ptr + index, narrow(v, v_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=[*_CONSTANTS, *_RANDOM])
def _step(codes_ptr, scales_ptr, new_scales_ptr, g_ptr, m_ptr, v_ptr, top_ptr, bad_ptr,
          columns, width, size, stride, lr, b1, a1, b2, a2, eps, c1, c2, decay, inject, per_row,
          tiles, segments, offset, key_low, key_high, tensor, step, SEG: tl.constexpr,
          P: tl.constexpr, ONE: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr,
          FMT: tl.constexpr, RHO_: tl.constexpr, POW2: tl.constexpr, ADAM: tl.constexpr,
          INJECT: tl.constexpr, SR: tl.constexpr, ALIGNED: tl.constexpr,
          NATIVE: tl.constexpr):  # fmt: skip
    s, row, first = _segments(per_row, size, SEG)
    known = s < segments
    place = s * 0 if SHARED else s
    old_scale = tl.load(scales_ptr + place, mask=known, other=0.0)[:, None]
    code_row = row * width
    if ONE:
        index, valid = _tile(0, row, first, columns, size, known, P)
        x, m, v, den = _update(codes_ptr, g_ptr, m_ptr, v_ptr, index, code_row, first, valid,
                               old_scale, 0, lr, b1, a1, b2, a2, eps, c1, c2, decay, SEG, P,
                               FMT, ADAM, NATIVE)  # fmt: skip
        top = largest_bits(x, 1)
    else:
        top = tl.zeros([SEG], tl.int32)
        if not TOP:
            for t in range(tiles):
                index, valid = _tile(t, row, first, columns, size, known, P)
                x, m, v, den = _update(codes_ptr, g_ptr, m_ptr, v_ptr, index, code_row, first,
                                       valid, old_scale, t, lr, b1, a1, b2, a2, eps, c1, c2,
                                       decay, SEG, P, FMT, ADAM, NATIVE)  # fmt: skip
                top = tl.maximum(top, largest_bits(x, 1))
    if TOP:
        top = tl.load(top_ptr + place, mask=known, other=0.0).to(tl.int32, bitcast=True)
        top = top & 0x7FFFFFFF
    ok = top < 0x7F800000
    scale = _scale(tl.where(ok, top, 0).to(tl.float32, bitcast=True), RHO_, POW2)
    first_of = known & (s == 0) if SHARED else known
    tl.store(new_scales_ptr + place, scale, mask=first_of & ok)
    bad = tl.sum((first_of & (ok == 0)).to(tl.int32), 0)
    if bad > 0:
        tl.atomic_add(bad_ptr, bad, sem="relaxed")
    known = known & ok
    scale = scale[:, None]
    if ONE:
        valid = valid & known[:, None]
        u = _uniforms(row, first, 0, offset, stride, key_low, key_high, tensor, step, SEG, P, SR,
                      ALIGNED)  # fmt: skip
        x = tl.where(valid, x, 0.0)
        _finish(codes_ptr, m_ptr, v_ptr, index, code_row, first, valid, scale, 0, x, m, v, den,
                u, inject, SEG, P, FMT, RHO_, ADAM, INJECT, SR, NATIVE)  # fmt: skip
    else:
        for t in range(tiles):
            index, valid = _tile(t, row, first, columns, size, known, P)
            x, m, v, den = _update(codes_ptr, g_ptr, m_ptr, v_ptr, index, code_row, first, valid,
                                   old_scale, t, lr, b1, a1, b2, a2, eps, c1, c2, decay, SEG, P,
                                   FMT, ADAM, NATIVE)  # fmt: skip
            u = _uniforms(row, first, t, offset, stride, key_low, key_high, tensor, step, SEG, P,
                          SR, ALIGNED)  # fmt: skip
            _finish(codes_ptr, m_ptr, v_ptr, index, code_row, first, valid, scale, t, x, m, v,
                    den, u, inject, SEG, P, FMT, RHO_, ADAM, INJECT, SR, NATIVE)  # fmt: skip


@triton.jit(do_not_specialize=_CONSTANTS)
def _step_absmax(codes_ptr, scales_ptr, g_ptr, m_ptr, v_ptr, top_ptr, columns, width, size, lr,
                 b1, a1, b2, a2, eps, c1, c2, decay, per_row, tiles, segments, SEG: tl.constexpr,
                 P: tl.constexpr, SHARED: tl.constexpr, FMT: tl.constexpr, ADAM: tl.constexpr,
                 NATIVE: tl.constexpr):  # fmt: skip
    s, row, first = _segments(per_row, size, SEG)
    known = s < segments
    place = s * 0 if SHARED else s
    scale = tl.load(scales_ptr + place, mask=known, other=0.0)[:, None]
    top = tl.zeros([SEG], tl.int32)
    for t in range(tiles):
        index, valid = _tile(t, row, first, columns, size, known, P)
        x, _, _, _ = _update(codes_ptr, g_ptr, m_ptr, v_ptr, index, row * width, first, valid,
                             scale, t, lr, b1, a1, b2, a2, eps, c1, c2, decay, SEG, P, FMT, ADAM,
                             NATIVE)  # fmt: skip
        top = tl.maximum(top, largest_bits(x, 1))
    tl.store(top_ptr + s, top.to(tl.float32, bitcast=True), mask=known)


@triton.jit(do_not_specialize=[*_CONSTANTS, *_RANDOM])
def _quantize(x_ptr, codes_ptr, scales_ptr, top_ptr, columns, width, size, stride, per_row, tiles,
              segments, offset, key_low, key_high, tensor, step, SEG: tl.constexpr,
              P: tl.constexpr, ONE: tl.constexpr, SHARED: tl.constexpr, FMT: tl.constexpr,
              RHO_: tl.constexpr, POW2: tl.constexpr, SR: tl.constexpr, ALIGNED: tl.constexpr,
              NATIVE: tl.constexpr):  # fmt: skip
    s, row, first = _segments(per_row, size, SEG)
    known = s < segments
    top = tl.zeros([SEG], tl.int32)
    index, valid = _tile(0, row, first, columns, size, known, P)
    x = widen(tl.load(x_ptr + index, mask=valid, other=0))
    if SHARED:
        top = tl.load(top_ptr + s * 0).to(tl.int32, bitcast=True)
    else:
        top = largest_bits(x, 1)
        for t in range(1, tiles):
            index, valid = _tile(t, row, first, columns, size, known, P)
            more = widen(tl.load(x_ptr + index, mask=valid, other=0))
            top = tl.maximum(top, largest_bits(more, 1))
    scale = _scale(top.to(tl.float32, bitcast=True), RHO_, POW2)
    if SHARED:
        tl.store(scales_ptr + s, scale, mask=s == 0)
    else:
        tl.store(scales_ptr + s, scale, mask=known)
    for t in range(tiles):
        index, valid = _tile(t, row, first, columns, size, known, P)
        if not ONE:
            x = widen(tl.load(x_ptr + index, mask=valid, other=0))
        u = _uniforms(row, first, t, offset, stride, key_low, key_high, tensor, step, SEG, P, SR,
                      ALIGNED)  # fmt: skip
        q, _ = _rounded(x, scale[:, None], u, RHO_, FMT, SR, NATIVE)
        _store_grid(codes_ptr, row * width, first, valid, t, q, SEG, P, FMT)


@triton.jit(do_not_specialize=_CONSTANTS)
def _dequantize(codes_ptr, scales_ptr, out_ptr, columns, width, size, per_row, tiles, segments,
                SEG: tl.constexpr, P: tl.constexpr, SHARED: tl.constexpr, FMT: tl.constexpr,
                NATIVE: tl.constexpr):  # fmt: skip
    s, row, first = _segments(per_row, size, SEG)
    known = s < segments
    place = s * 0 if SHARED else s
    scale = tl.load(scales_ptr + place, mask=known, other=0.0)[:, None]
    for t in range(tiles):
        index, valid = _tile(t, row, first, columns, size, known, P)
        x = _load_grid(codes_ptr, row * width, first, valid, t, SEG, P, FMT, NATIVE) * scale
        tl.store(out_ptr + index, narrow(x, out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["n", *RANDOM])
def _stochastic_bf16(x_ptr, out_ptr, n, offset, key_low, key_high, tensor, step,
                     BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    first = begin + tl.arange(0, 1)[:, None]
    index = first + tl.arange(0, BLOCK)[None, :]
    word = word_tile(first + offset, 1, BLOCK, ALIGNED, key_low, key_high, tensor, step)
    if begin + BLOCK <= n:
        x = tl.load(x_ptr + index)
    else:
        x = tl.load(x_ptr + index, mask=index < n, other=0.0)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + (word >> 16)) & 0xFFFF0000
    rounded = tl.where((bits & 0x7F800000) == 0x7F800000, bits, rounded)
    store_tile(out_ptr, index, begin + BLOCK, n, rounded.to(tl.float32, bitcast=True))


class _Cut:
    """How a matrix [R, C] is cut into segments and tiles."""

    def __init__(self, shape: torch.Size, quantizer: Quantizer, device: torch.device) -> None:
        rows, columns = shape
        shared = quantizer.group < 0
        self.size = quantizer.group if quantizer.group > 0 else max(columns, 1)
        self.per_row = 1 if shared else max(grid(columns, self.size), 1)
        self.segments = rows * self.per_row
        native = quantizer.fmt == "fp8_e4m3" and has_fp8(device)
        emulated = quantizer.fmt == "fp8_e4m3" and not native  # which takes registers of its own
        whole = max(triton.next_power_of_2(self.size), 32)
        tile = whole if whole <= (_HALF if emulated else 2 * _HALF) else _HALF
        self.tiles = grid(self.size, tile)
        per_block = tile_rows(tile, _BLOCK)
        self.blocks = (grid(self.segments, per_block),)
        self.width = code_columns(columns, quantizer.fmt)
        self.counts = (self.per_row, self.tiles, self.segments)
        self.constants: dict[str, Any] = {
            "warps": max(4, tile * per_block // 512), "SEG": per_block, "P": tile,
            "SHARED": shared, "FMT": _FORMAT_CODES[quantizer.fmt],
            "NATIVE": native,
        }  # fmt: skip

    def random(self, key: RandomKey | None, stride: int) -> tuple[int, ...]:
        """Return offset and words of a key; sets the constants that go with it."""
        run_key, tensor, step, offset = (key or RandomKey()).words
        self.constants["SR"] = key is not None
        steps = (offset, stride, self.size if self.per_row > 1 else 0)
        self.constants["ALIGNED"] = all(s % 4 == 0 for s in steps)
        return (offset, *random_words(run_key, tensor, step))


def _numbers(h: Step) -> tuple[float, ...]:
    return (h.lr, h.b1, 1 - h.b1, h.b2, 1 - h.b2, h.eps, h.c1, h.c2, h.decay)


def quantize(
    x_RC: Tensor,
    quantizer: Quantizer,
    key: RandomKey | None,
    magnitude: Tensor | None,
    row_stride: int,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x [R, C] (see the package's `quantize`)."""
    rows, columns = x_RC.shape
    cut = _Cut(x_RC.shape, quantizer, x_RC.device)
    codes = torch.empty(rows, cut.width, dtype=torch.uint8, device=x_RC.device)
    scales = torch.empty(num_scales(rows, columns, quantizer.group), device=x_RC.device)
    if quantizer.group < 0 and not x_RC.numel():
        return codes, scales.fill_(1.0)
    if quantizer.group < 0 and magnitude is None:
        low, high = x_RC.aminmax()  # no copy of the tensor, as abs would make
        magnitude = torch.maximum(-low.float(), high.float()).view(1)
    words = cut.random(key, row_stride)
    launch(
        _quantize, cut.blocks, pattern(x_RC), codes, scales, magnitude, columns, cut.width,
        cut.size, row_stride, *cut.counts, *words, ONE=cut.tiles == 1, RHO_=RHO[quantizer.fmt],
        POW2=quantizer.pow2_scale, **cut.constants,
    )  # fmt: skip
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, out: Tensor, quantizer: Quantizer) -> None:
    """Write the values of codes and scales into out [R, C]."""
    cut = _Cut(out.shape, quantizer, out.device)
    launch(
        _dequantize, cut.blocks, codes, scales, pattern(out), out.shape[1], cut.width, cut.size,
        *cut.counts, **cut.constants,
    )  # fmt: skip


def step_absmax(
    codes: Tensor,
    scales: Tensor,
    g_RC: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
    quantizer: Quantizer,
    h: Step,
) -> Tensor:
    """Return the magnitudes [S] of the weights after the step (see the package's)."""
    cut = _Cut(g_RC.shape, quantizer, g_RC.device)
    top = torch.zeros(cut.segments, device=g_RC.device)
    m = pattern(exp_avg)
    launch(
        _step_absmax, cut.blocks, codes, scales, pattern(g_RC), m,
        m if exp_avg_sq is None else pattern(exp_avg_sq), top, g_RC.shape[1], cut.width, cut.size,
        *_numbers(h), *cut.counts, ADAM=h.adam, **cut.constants,
    )  # fmt: skip
    if quantizer.group >= 0:
        return top
    return top.amax().view(1) if len(top) else top.new_zeros(1)


def step(
    codes: Tensor,
    scales: Tensor,
    g_RC: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
    quantizer: Quantizer,
    h: Step,
    key: RandomKey | None,
    magnitude: Tensor | None,
    row_stride: int,
) -> int:
    """Take one step in place; return how many scales were left alone (see the package's)."""
    cut = _Cut(g_RC.shape, quantizer, g_RC.device)
    # One scale for all must stay readable until the last segment is dequantized.
    new_scales = scales.clone() if quantizer.group < 0 else scales
    bad = torch.zeros(1, dtype=torch.int32, device=g_RC.device)
    m = pattern(exp_avg)
    words = cut.random(key, row_stride)
    launch(
        _step, cut.blocks, codes, scales, new_scales, pattern(g_RC), m,
        m if exp_avg_sq is None else pattern(exp_avg_sq), magnitude, bad, g_RC.shape[1],
        cut.width, cut.size, row_stride, *_numbers(h), h.inject, *cut.counts, *words,
        ONE=cut.tiles == 1, TOP=magnitude is not None, RHO_=RHO[quantizer.fmt],
        POW2=quantizer.pow2_scale, ADAM=h.adam, INJECT=h.inject != 0.0, **cut.constants,
    )  # fmt: skip
    if quantizer.group < 0:
        scales.copy_(new_scales)
    return int(bad)


def stochastic_bf16(x: Tensor, key: RandomKey, out: Tensor) -> None:
    """Round fp32 x stochastically into bf16 out."""
    run_key, tensor, number, offset = key.words
    launch(
        _stochastic_bf16, (grid(x.numel(), _BLOCK),), x.contiguous(), pattern(out), x.numel(),
        offset, *random_words(run_key, tensor, number), BLOCK=_BLOCK, ALIGNED=offset % 4 == 0,
    )  # fmt: skip
