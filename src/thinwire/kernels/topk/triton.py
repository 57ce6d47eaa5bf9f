"""Chunked top-k on CUDA: equals `reference.py` bit for bit.

Encoding takes three launches. `_select`, a program per chunk, reads the values once, searches the
k-th largest magnitude bit by bit and writes the kept entries to scratch, ascending. `_levels` (or
`_paper`) adds them in the reference's order, in fp64: a lane per chunk. `_pack` writes indices,
codes and what rounding leaves in the residual.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.device import (
    bf16_bits,
    flip_sign,
    grid,
    launch,
    load_bytes,
    narrow,
    pattern,
    round_even,
    store_bytes,
    widen,
)
from thinwire.kernels.topk.geometry import Geometry
from thinwire.kernels.topk.reference import head_nbytes

__all__ = ["add", "decode", "encode"]

_SYM, _PAPER, _NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_QUANTS = {"sym": 0, "paper": 1, "none": 2}
_LANES = 128  # chunks per program of `_levels`
_CHUNKS, _ENTRIES = 16, 64  # tile of `_pack` and `_scatter`
# These go byte by byte: a kernel of its own for aligned arguments would gain nothing.
_BYTES = [
    "cell_ptr", "kept_ptr", "geo_ptr", "level_ptr", "wire_ptr", "out_ptr", "new_ptr", "bad_ptr",
    "chunks", "values", "head", "pitch",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Plan:
    """A geometry on a device: int64 [7, C] of base, height, width, k, first, index_at, code_at."""

    table: Tensor
    most: int
    entries: int
    cells: int
    aligned: bool


@lru_cache(maxsize=1024)
def _plan(geo: Geometry, device: torch.device) -> _Plan:
    rows = (geo.base, geo.height, geo.width, geo.k, geo.first, geo.index_at, geo.code_at)
    return _Plan(
        table=torch.from_numpy(np.stack(rows)).to(device),
        most=int(geo.k.max()),
        entries=geo.entries,
        cells=triton.next_power_of_2(int(geo.height.max()) * geo.tile_width),
        aligned=not bool((geo.base % 16).any()),
    )


@triton.jit
def _level_bits(x, BF16: tl.constexpr):
    if BF16:
        h = bf16_bits(x)
    else:
        h = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return h


@triton.jit
def _level_value(h, BF16: tl.constexpr):
    if BF16:
        x = (h << 16).to(tl.float32, bitcast=True)
    else:
        x = h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _cells(geo_ptr, chunks, pitch, P: tl.constexpr, WIDTH: tl.constexpr,
           ALIGNED: tl.constexpr):  # fmt: skip
    """Return this chunk's flat indices [P] in order of wire indices, which are inside, and all."""
    chunk = tl.program_id(0)
    base = tl.load(geo_ptr + chunk)
    height = tl.load(geo_ptr + chunks + chunk)
    width = tl.load(geo_ptr + 2 * chunks + chunk)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    cell = tl.arange(0, P)
    row, column = cell // WIDTH, cell % WIDTH
    inside = (row < height) & (column < width)
    return base + row.to(tl.int64) * pitch + column, inside, height * width == P


@triton.jit
def _threshold(keys, k):
    """Return t and need: keys above t are kept, and the first `need` of those equal to it."""
    t = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32) - 1
    bit = tl.zeros([], tl.int32) + 30
    # Done early where no tie straddles the k-th place: most chunks need half of the bits.
    while (bit >= 0) & (count != k):
        candidate = t | (1 << bit)
        found = tl.sum((keys >= candidate).to(tl.int32), 0)
        count = tl.where(found >= k, found, count)
        t = tl.where(found >= k, candidate, t)
        bit -= 1
    t = tl.where(count == k, t - 1, t)
    return t, k - tl.sum((keys > t).to(tl.int32), 0)


@triton.jit(do_not_specialize=["geo_ptr", "cell_ptr", "kept_ptr", "chunks"])
def _select(x_ptr, old_ptr, new_ptr, geo_ptr, cell_ptr, kept_ptr, chunks, pitch, beta,
            P: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
            FEEDBACK: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    k = tl.load(geo_ptr + 3 * chunks + chunk).to(tl.int32)
    first = tl.load(geo_ptr + 4 * chunks + chunk)
    at, inside, full = _cells(geo_ptr, chunks, pitch, P, WIDTH, ALIGNED)
    if full:
        a = widen(tl.load(x_ptr + at))
        if FEEDBACK:
            a = beta * tl.load(old_ptr + at) + a
            tl.store(new_ptr + at, a)
    else:
        a = widen(tl.load(x_ptr + at, mask=inside, other=0))
        if FEEDBACK:
            a = beta * tl.load(old_ptr + at, mask=inside, other=0) + a
            tl.store(new_ptr + at, a, mask=inside)
    keys = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    keys = tl.where(inside, keys, -1)
    flagged = tl.max(keys, 0) >= 0x7F800000
    keys = tl.where(flagged, tl.minimum(keys, 0), keys)
    t, need = _threshold(keys, k)
    above, equal = (keys > t).to(tl.int32), (keys == t).to(tl.int32)
    before = tl.cumsum(above + (equal << 16), 0)  # two counts, at most 4096 each
    ties = (before >> 16) - equal
    keep = (above + tl.where(ties < need, equal, 0)) != 0
    place = first + (before & 0xFFFF) - above + tl.minimum(ties, need)
    tl.store(cell_ptr + place, tl.arange(0, P), mask=keep)
    tl.store(kept_ptr + place, tl.where(flagged, float("nan"), a), mask=keep)


@triton.jit(do_not_specialize=["kept_ptr", "geo_ptr", "out_ptr", "level_ptr", "chunks", "most"])
def _levels(kept_ptr, geo_ptr, out_ptr, level_ptr, chunks, most, BF16: tl.constexpr,
            LANES: tl.constexpr):  # fmt: skip
    """Write lo, hi to the head and lo, hi, threshold fp32 [3, C], a lane per chunk."""
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = chunk < chunks
    k = tl.load(geo_ptr + 3 * chunks + chunk, mask=mask, other=1).to(tl.int32)
    at = kept_ptr + tl.load(geo_ptr + 4 * chunks + chunk, mask=mask, other=0)
    total = tl.zeros([LANES], tl.float64)
    for j in range(most):
        total += tl.abs(tl.load(at + j, mask=mask & (j < k), other=0.0)).to(tl.float64)
    threshold = (total / k.to(tl.float64)).to(tl.float32)
    low, high = threshold, threshold
    for _ in range(3):
        over, under = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.float64)
        count = tl.zeros([LANES], tl.int32)
        for j in range(most):
            a = tl.abs(tl.load(at + j, mask=mask & (j < k), other=0.0))
            is_over = a > threshold
            count += tl.where(is_over & (j < k), 1, 0)
            over += tl.where(is_over, a, 0.0).to(tl.float64)
            under += tl.where(is_over, 0.0, a).to(tl.float64)
        some, rest = tl.maximum(count, 1), tl.maximum(k - count, 1)
        high = tl.where(count > 0, (over / some.to(tl.float64)).to(tl.float32), 0.0)
        low = tl.where(k > count, (under / rest.to(tl.float64)).to(tl.float32), 0.0)
        threshold = (low + high) * 0.5
    a, b = _level_bits(low, BF16), _level_bits(high, BF16)
    low, high = _level_value(a, BF16), _level_value(b, BF16)
    ok = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
    NAN: tl.constexpr = 0x7FC07FC0 if BF16 else 0x7E007E00
    store_bytes(out_ptr + 4 * chunk.to(tl.int64), tl.where(ok, a | (b << 16), NAN), mask, 4)
    tl.store(level_ptr + chunk, tl.where(ok, low, float("nan")), mask=mask)
    tl.store(level_ptr + chunks + chunk, tl.where(ok, high, float("nan")), mask=mask)
    tl.store(level_ptr + 2 * chunks + chunk, threshold, mask=mask)


@triton.jit
def _paper_code(c, step):
    """Return the code of c = v - mean (0 where it is NaN)."""
    y = tl.div_rn(c, step) + 2.0
    return tl.where(y == y, round_even(tl.minimum(tl.maximum(y, 0.0), 3.0)), 0)


@triton.jit(do_not_specialize=["kept_ptr", "out_ptr", "level_ptr", "entries"])
def _paper(kept_ptr, out_ptr, level_ptr, entries):
    """Write mean and table to the head and mean, step, table fp32 [6], one entry at a time."""
    count = entries.to(tl.float64)
    total = tl.zeros([], tl.float64)
    for i in range(entries):
        total += tl.load(kept_ptr + i).to(tl.float64)
    mean = (total / count).to(tl.float32)
    mean = tl.where(mean == mean, mean, float("nan"))  # one pattern of NaN on every device
    total = tl.zeros([], tl.float64)
    for i in range(entries):
        total += (tl.load(kept_ptr + i) - mean).to(tl.float64)
    center = total / count
    square = tl.zeros([], tl.float64)
    for i in range(entries):
        d = (tl.load(kept_ptr + i) - mean).to(tl.float64) - center
        square += d * d
    sigma = tl.sqrt(square / tl.maximum(count - 1.0, 1.0)).to(tl.float32)
    step = (6.0 * sigma) * 0.25
    step = tl.where((step > 0) & (step < float("inf")), step, 1.0)
    s0, s1 = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    s2, s3 = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    n0, n1, n2, n3 = 0, 0, 0, 0
    for i in range(entries):
        c = tl.load(kept_ptr + i) - mean
        code = tl.where(c == c, _paper_code(c, step), 4)
        wide = c.to(tl.float64)
        s0 += tl.where(code == 0, wide, 0.0)
        s1 += tl.where(code == 1, wide, 0.0)
        s2 += tl.where(code == 2, wide, 0.0)
        s3 += tl.where(code == 3, wide, 0.0)
        n0 += (code == 0).to(tl.int32)
        n1 += (code == 1).to(tl.int32)
        n2 += (code == 2).to(tl.int32)
        n3 += (code == 3).to(tl.int32)
    tl.store(level_ptr, mean)
    tl.store(level_ptr + 1, step)
    store_bytes(out_ptr, mean.to(tl.int32, bitcast=True), True, 4)
    _paper_entry(out_ptr, level_ptr, 0, s0, n0)
    _paper_entry(out_ptr, level_ptr, 1, s1, n1)
    _paper_entry(out_ptr, level_ptr, 2, s2, n2)
    _paper_entry(out_ptr, level_ptr, 3, s3, n3)


@triton.jit
def _paper_entry(out_ptr, level_ptr, J: tl.constexpr, total, count):
    mean = (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    mean = tl.where(count > 0, mean, 0.0)
    tl.store(level_ptr + 2 + J, mean)
    store_bytes(out_ptr + 4 + 4 * J, mean.to(tl.int32, bitcast=True), True, 4)


@triton.jit
def _code(v, chunk, mask, level_ptr, chunks, QUANT: tl.constexpr):
    """Return codes int32 and decoded values fp32 of v [CB, J] of chunks [CB]."""
    if QUANT == _SYM:
        low = tl.load(level_ptr + chunk, mask=mask, other=0.0)[:, None]
        high = tl.load(level_ptr + chunks + chunk, mask=mask, other=0.0)[:, None]
        threshold = tl.load(level_ptr + 2 * chunks + chunk, mask=mask, other=0.0)[:, None]
        large, negative = tl.abs(v) > threshold, v < 0
        code = negative.to(tl.int32) + 2 * large.to(tl.int32)
        code = tl.where(low == low, code, 0)
        value = tl.where(large, high, low)
        value = flip_sign(value, negative)
    elif QUANT == _PAPER:
        mean = tl.load(level_ptr)
        code = _paper_code(v - mean, tl.load(level_ptr + 1))
        value = mean + tl.load(level_ptr + 2 + code)
    else:
        code = tl.zeros_like(v).to(tl.int32)
        value = v
    return code, value


@triton.jit(do_not_specialize=_BYTES)
def _pack(cell_ptr, kept_ptr, geo_ptr, level_ptr, out_ptr, new_ptr, chunks, values, head, pitch,
          QUANT: tl.constexpr, WIDTH: tl.constexpr, FEEDBACK: tl.constexpr, CB: tl.constexpr,
          J: tl.constexpr):  # fmt: skip
    """Write indices from byte `head` and codes or values from byte `values` on."""
    chunk = tl.program_id(0) * CB + tl.arange(0, CB)
    j = tl.program_id(1) * J + tl.arange(0, J)[None, :]
    mask = chunk < chunks
    k = tl.load(geo_ptr + 3 * chunks + chunk, mask=mask, other=0)[:, None]
    first = tl.load(geo_ptr + 4 * chunks + chunk, mask=mask, other=0)[:, None]
    used = j < k
    cell = tl.load(cell_ptr + first + j, mask=used, other=0)
    v = tl.load(kept_ptr + first + j, mask=used, other=0.0)
    code, value = _code(v, chunk, mask, level_ptr, chunks, QUANT)
    if FEEDBACK:
        base = tl.load(geo_ptr + chunk, mask=mask, other=0)[:, None]
        at = base + (cell // WIDTH).to(tl.int64) * pitch + cell % WIDTH
        tl.store(new_ptr + at, v - value, mask=used)
    a, b = tl.split(tl.reshape(cell, [CB, J // 2, 2]))
    pair = tl.program_id(1) * (J // 2) + tl.arange(0, J // 2)[None, :]
    index_at = tl.load(geo_ptr + 5 * chunks + chunk, mask=mask, other=0)[:, None]
    at = out_ptr + head + index_at + 3 * pair
    store_bytes(at, a | (b << 12), 2 * pair < k, 2)
    tl.store(at + 2, (b >> 4).to(tl.uint8), mask=2 * pair + 1 < k)
    if QUANT == _NONE:
        at = out_ptr + values + 4 * (first + j)
        store_bytes(at, v.to(tl.int32, bitcast=True), used, 4)
    else:
        code = tl.reshape(tl.where(used, code, 0), [CB, J // 4, 4])
        code = tl.sum(code << (2 * tl.arange(0, 4))[None, None, :], 2)
        four = tl.program_id(1) * (J // 4) + tl.arange(0, J // 4)[None, :]
        code_at = tl.load(geo_ptr + 6 * chunks + chunk, mask=mask, other=0)[:, None]
        tl.store(out_ptr + values + code_at + four, code.to(tl.uint8), mask=4 * four < k)


@triton.jit
def _wire_index(at, j, mask):
    """Return entry j of the 12-bit indices that start at pointers `at`, -1 where not `mask`."""
    word = load_bytes(at + 3 * (j // 2) + (j % 2), mask, 2)
    return tl.where(mask, tl.where(j % 2 == 0, word & 0xFFF, word >> 4), -1)


@triton.jit(do_not_specialize=_BYTES)
def _scatter(wire_ptr, geo_ptr, out_ptr, bad_ptr, chunks, values, head, pitch,
             QUANT: tl.constexpr, BF16: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
             CB: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Write or add one message's entries; mark chunks whose indices no encoder writes."""
    chunk = tl.program_id(0) * CB + tl.arange(0, CB)
    j = tl.program_id(1) * J + tl.arange(0, J)[None, :]
    mask = chunk < chunks
    base = tl.load(geo_ptr + chunk, mask=mask, other=0)[:, None]
    height = tl.load(geo_ptr + chunks + chunk, mask=mask, other=0)[:, None]
    width = tl.load(geo_ptr + 2 * chunks + chunk, mask=mask, other=0)[:, None]
    k = tl.load(geo_ptr + 3 * chunks + chunk, mask=mask, other=0)[:, None]
    first = tl.load(geo_ptr + 4 * chunks + chunk, mask=mask, other=0)[:, None]
    index_at = tl.load(geo_ptr + 5 * chunks + chunk, mask=mask, other=0)[:, None]
    code_at = tl.load(geo_ptr + 6 * chunks + chunk, mask=mask, other=0)[:, None]
    used = j < k
    at = wire_ptr + head + index_at
    index = _wire_index(at, j, used)
    previous = _wire_index(at, j - 1, used & (j > 0))
    row, column = index // WIDTH, index % WIDTH
    good = used & (index > previous) & (row < height) & (column < width)
    wrong = tl.max((used & (good == 0)).to(tl.int32), 1)
    tl.store(bad_ptr + chunk, wrong, mask=mask & (wrong > 0))
    if QUANT == _NONE:
        word = load_bytes(wire_ptr + values + 4 * (first + j), good, 4)
        value = word.to(tl.float32, bitcast=True)
    else:
        byte = tl.load(wire_ptr + values + code_at + j // 4, mask=good, other=0).to(tl.int32)
        code = (byte >> (2 * (j % 4))) & 3
        if QUANT == _PAPER:
            mean = load_bytes(wire_ptr + tl.zeros_like(code), good, 4)
            entry = load_bytes(wire_ptr + 4 + 4 * code, good, 4)
            value = mean.to(tl.float32, bitcast=True) + entry.to(tl.float32, bitcast=True)
        else:
            at = wire_ptr + 4 * chunk.to(tl.int64)[:, None] + 2 * (code >> 1)
            value = _level_value(load_bytes(at, good, 2), BF16)
            value = flip_sign(value, code & 1)
    at = out_ptr + base + row.to(tl.int64) * pitch + column
    if ADD:
        value = tl.load(at, mask=good, other=0.0) + value
    tl.store(at, narrow(value, out_ptr.dtype.element_ty), mask=good)


def encode(
    x: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    beta: float,
    out: Tensor,
    geo: Geometry,
    quant: str,
    level: str,
) -> None:
    """Encode x [N], or beta*residual + x with what is not sent to new_residual, into out [W]."""
    if geo.entries == 0:
        return
    plan, head = _plan(geo, x.device), head_nbytes(geo, quant)
    values = head + geo.index_nbytes
    out[values + (4 * plan.entries if quant == "none" else geo.code_nbytes) :].zero_()
    cells = torch.empty(plan.entries, dtype=torch.int32, device=x.device)
    kept = torch.empty(plan.entries, dtype=torch.float32, device=x.device)
    levels = torch.empty(3 * geo.chunks + 6, dtype=torch.float32, device=x.device)
    feedback = residual is not None
    launch(
        _select, (geo.chunks,), pattern(x), residual, new_residual, plan.table, cells, kept,
        geo.chunks, geo.pitch, beta, warps=max(1, min(8, plan.cells // 512)), P=plan.cells,
        WIDTH=geo.tile_width, ALIGNED=plan.aligned, FEEDBACK=feedback,
    )  # fmt: skip
    if quant == "sym":
        launch(
            _levels, (grid(geo.chunks, _LANES),), kept, plan.table, out, levels, geo.chunks,
            plan.most, BF16=level == "bf16", LANES=_LANES,
        )  # fmt: skip
    elif quant == "paper":
        launch(_paper, (1,), kept, out, levels, plan.entries, warps=1)
    launch(
        _pack, (grid(geo.chunks, _CHUNKS), grid(plan.most, _ENTRIES)), cells, kept, plan.table,
        levels, out, new_residual, geo.chunks, values, head, geo.pitch, QUANT=_QUANTS[quant],
        WIDTH=geo.tile_width, FEEDBACK=feedback, CB=_CHUNKS, J=_ENTRIES,
    )  # fmt: skip


def _scatter_rows(
    wires: Tensor, outs: list[Tensor], geo: Geometry, quant: str, level: str, add_: bool
) -> int:
    """Scatter each message into its tensor, in order; return how many chunks are impossible."""
    plan, head = _plan(geo, wires.device), head_nbytes(geo, quant)
    bad = torch.zeros(len(wires), geo.chunks, dtype=torch.int32, device=wires.device)
    for wire, out, marks in zip(wires, outs, bad, strict=True):
        launch(
            _scatter, (grid(geo.chunks, _CHUNKS), grid(plan.most, _ENTRIES)), wire, plan.table,
            pattern(out), marks, geo.chunks, head + geo.index_nbytes, head, geo.pitch,
            QUANT=_QUANTS[quant], BF16=level == "bf16", WIDTH=geo.tile_width, ADD=add_,
            CB=_CHUNKS, J=_ENTRIES,
        )  # fmt: skip
    return int(bad.sum())


def decode(wires: Tensor, out: Tensor, geo: Geometry, quant: str, level: str) -> int:
    """Decode wires [R, W] into out [R, N]; return how many chunks have impossible indices."""
    if geo.entries == 0:
        return 0
    out.zero_()
    return _scatter_rows(wires, list(out), geo, quant, level, False)


def add(wires: Tensor, out: Tensor, geo: Geometry, quant: str, level: str) -> int:
    """Add wires [R, W], in rank order, to fp32 out [N]; return as `decode` does."""
    if geo.entries == 0:
        return 0
    return _scatter_rows(wires, [out] * len(wires), geo, quant, level, True)
