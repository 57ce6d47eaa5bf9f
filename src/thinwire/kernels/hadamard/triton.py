"""Scaled and rotated groups on CUDA: equals `reference.py` bit for bit.

Legend: a tile is [A, R, V]: element a*V + v of group r, R groups, A*V = G elements each.

The transform never leaves the registers of one warp: with V the elements of a 16-byte load and
the lanes spread over R first, most strides are inside a thread and the rest are shuffles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.device import (
    bf16_bits,
    flip_sign,
    fp8_code,
    fp8_value,
    grid,
    has_fp8,
    launch,
    load_bytes,
    load_tile,
    pattern,
    round_even,
    store_bytes,
    store_tile,
    tile_rows,
)
from thinwire.kernels.hadamard.reference import FORMATS, S_RANGE, Layout, inverse_root

__all__ = ["decode", "decode_sum", "decode_sum_encode", "encode"]

_V = 8
_TILE = 1024  # 32 elements per thread of one warp
_FORMAT_CODES = {"e4m3": 0, "e5m2": 1, "int8": 2, "int4": 3}
_ROUNDINGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def _index(G: tl.constexpr, R: tl.constexpr, V: tl.constexpr):
    """Return groups int64 [R] of this program and flat indices [A, R, V]."""
    A: tl.constexpr = G // V
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    place = tl.arange(0, A)[:, None, None] * V + tl.arange(0, V)[None, None, :]
    return row, row[None, :, None] * G + place


@triton.jit
def _spread(x):
    """Return [R] as [1, R, 1]."""
    return x[None, :, None]


@triton.jit
def _butterfly(x, SHAPE: tl.constexpr, AXIS: tl.constexpr, ONES: tl.constexpr):
    """Return a + b and a - b in place of the pairs (a, b) along an axis of length 2.

    The other of a pair comes as the sum of both patterns less one's own: one shuffle, exact.
    """
    pairs = tl.reshape(x, SHAPE)
    bits = pairs.to(tl.int32, bitcast=True)
    other = (tl.sum(bits, AXIS, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    return other + flip_sign(pairs, tl.reshape(tl.arange(0, 2), ONES))


@triton.jit
def _transform(x, G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, inv_root):
    """Return H x / sqrt(G) of each group: strides 1, 2, 4, ..."""
    A: tl.constexpr = G // V
    STAGES: tl.constexpr = (
        5 if G == 32 else 6 if G == 64 else 7 if G == 128 else 8 if G == 256 else 9
    )
    for i in tl.static_range(STAGES):
        if (1 << i) < V:
            y = _butterfly(x, [A, R, V // (2 << i), 2, 1 << i], 3, [1, 1, 1, 2, 1])
        else:
            y = _butterfly(x, [A * V // (2 << i), 2, (1 << i) // V, R, V], 1, [1, 2, 1, 1, 1])
        x = tl.reshape(y, [A, R, V])
    return x * inv_root


@triton.jit
def _largest(x):
    """Return the largest |x| of each group as int32 bits [R]."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(bits, 2), 0)


@triton.jit
def _mean_square(x, G: tl.constexpr, R: tl.constexpr, V: tl.constexpr):
    """Return the mean square of each group, halves added first, then quarters, ..."""
    total = x * x
    for i in tl.static_range(6):
        if (G // V) >> i > 1:
            total = tl.sum(tl.reshape(total, [2, (G // V) >> (i + 1), R, V]), 0)
    total = tl.reshape(total, [R, V])
    for i in tl.static_range(3):
        total = tl.sum(tl.reshape(total, [R, 2, V >> (i + 1)]), 1)
    return tl.reshape(total, [R]) * (1.0 / G)


@triton.jit
def _encode_tile(x, out_ptr, row, groups, tail, target, inv_root, G: tl.constexpr,
                 R: tl.constexpr, V: tl.constexpr, FMT: tl.constexpr, HADAMARD: tl.constexpr,
                 ALPHA: tl.constexpr, MERGE: tl.constexpr, ZERO: tl.constexpr,
                 LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
                 NATIVE: tl.constexpr):  # fmt: skip
    """Write codes and scales of groups x [A, R, V]."""
    ok = _largest(x) < 0x7F800000
    alpha = tl.full([R], 1.0, tl.float32)
    if ALPHA:
        m = tl.maximum(_mean_square(x, G, R, V) + 1e-6, 1e-12)
        alpha = tl.minimum(tl.maximum(tl.div_rn(target, tl.sqrt_rn(m)), 1e-3), 1e3)
        x = x * _spread(alpha)
    if HADAMARD:
        x = _transform(x, G, R, V, inv_root)
    top = _largest(x)
    ok = ok & (top < 0x7F800000)
    s = tl.maximum(top.to(tl.float32, bitcast=True), LOW)
    s = tl.maximum(tl.div_rn(s, target), LOW)
    if FMT < 2:
        s = tl.minimum(s, HIGH)
    ok = ok & (s <= HIGH)
    y = tl.div_rn(x, _spread(tl.where(ok, s, 1.0)))
    y = tl.where(_spread(ok), tl.minimum(tl.maximum(y, -LIMIT), LIMIT), 0.0)
    mask = row < groups
    a, v = tl.arange(0, G // V)[:, None, None], tl.arange(0, V)[None, None, :]
    if FMT == 3:
        pairs = tl.reshape(round_even(y) + 8, [G // V, R, V // 2, 2])
        codes = tl.sum(pairs << (4 * tl.arange(0, 2))[None, None, None, :], 3)
        half = tl.arange(0, V // 2)[None, None, :]
        at = out_ptr + _spread(row) * (G // 2) + a * (V // 2) + half
    else:
        if FMT == 2:
            codes = round_even(y)
        else:
            codes = fp8_code(y, FMT == 0, NATIVE)
        at = out_ptr + _spread(row) * G + a * V + v
    tl.store(at, codes.to(tl.uint8), mask=_spread(mask))
    at = out_ptr + tail + 4 * row
    if ALPHA and not MERGE:
        s = tl.where(ok, s, 1e-12 if ZERO else float("nan"))
        alpha = tl.where(ok, alpha, 1e-3)
        store_bytes(at + 4 * groups, alpha.to(tl.int32, bitcast=True), mask, 4)
    else:
        if ALPHA:
            s = tl.div_rn(s, alpha)
        s = tl.where(ok, s, -1e-12 if ZERO else float("nan"))
    store_bytes(at, s.to(tl.int32, bitcast=True), mask, 4)


@triton.jit
def _decode_tile(wire_ptr, row, groups, tail, inv_root, low, high, G: tl.constexpr,
                 R: tl.constexpr, V: tl.constexpr, FMT: tl.constexpr, HADAMARD: tl.constexpr,
                 FIELDS: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Return groups `row` of one message as fp32 [A, R, V]."""
    mask = row < groups
    at = wire_ptr + tail + 4 * row
    s = load_bytes(at, mask, 4).to(tl.float32, bitcast=True)
    alpha = tl.full([R], 1.0, tl.float32)
    if FIELDS == 2:
        alpha = load_bytes(at + 4 * groups, mask, 4).to(tl.float32, bitcast=True)
        # Nested choices, since vectorized truth values would take a stack slot.
        zeroed = tl.where(s == 1e-12, tl.where(alpha == 1e-3, 1, 0), 0)
        sound = tl.where(alpha >= 1e-3, tl.where(alpha <= 1e3, s, float("nan")), float("nan"))
    else:
        zeroed = tl.where(s == -1e-12, 1, 0)
        sound = s
    sound = tl.where(s >= low, tl.where(s <= high, sound, float("nan")), float("nan"))
    s = tl.where(zeroed == 1, 0.0, sound)
    alpha = tl.where(s > 0, alpha, 1.0)
    a, v = tl.arange(0, G // V)[:, None, None], tl.arange(0, V)[None, None, :]
    if FMT == 3:
        half = tl.arange(0, V // 2)[None, None, :]
        at = wire_ptr + _spread(row) * (G // 2) + a * (V // 2) + half
        c = tl.load(at, mask=_spread(mask), other=0).to(tl.int32)
        c = (c[:, :, :, None] >> (4 * tl.arange(0, 2))[None, None, None, :]) & 15
        q = (tl.reshape(c, [G // V, R, V]) - 8).to(tl.float32)
    else:
        at = wire_ptr + _spread(row) * G + a * V + v
        c = tl.load(at, mask=_spread(mask), other=0).to(tl.int32)
        if FMT == 2:
            q = c.to(tl.int8).to(tl.float32)
        else:
            top = tl.max(tl.max(c & 0x7F, 2), 0)
            s = tl.where(top >= (0x7F if FMT == 0 else 0x7C), float("nan"), s)
            q = fp8_value(c, FMT == 0, NATIVE)
    x = q * _spread(s)
    if HADAMARD:
        x = _transform(x, G, R, V, inv_root)
    if FIELDS == 2:
        x = tl.div_rn(x, _spread(alpha))
    return x


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    if ROUND == 1:
        x = (bf16_bits(x) << 16).to(tl.float32, bitcast=True)
    elif ROUND == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["n", "groups", "tail"])
def _encode(x_ptr, out_ptr, n, groups, tail, target, inv_root, G: tl.constexpr,
            R: tl.constexpr, V: tl.constexpr, FMT: tl.constexpr, HADAMARD: tl.constexpr,
            ALPHA: tl.constexpr, MERGE: tl.constexpr, ZERO: tl.constexpr, LIMIT: tl.constexpr,
            LOW: tl.constexpr, HIGH: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    row, index = _index(G, R, V)
    end = (tl.program_id(0).to(tl.int64) + 1) * (R * G)
    x = load_tile(x_ptr, index, end, n)
    _encode_tile(x, out_ptr, row, groups, tail, target, inv_root, G, R, V, FMT, HADAMARD, ALPHA,
                 MERGE, ZERO, LIMIT, LOW, HIGH, NATIVE)  # fmt: skip


@triton.jit(do_not_specialize=["n", "groups", "tail", "messages"])
def _decode(wire_ptr, out_ptr, n, groups, tail, messages, wire_stride, out_stride, inv_root,
            low, high, G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, FMT: tl.constexpr,
            HADAMARD: tl.constexpr, FIELDS: tl.constexpr, NATIVE: tl.constexpr,
            SUM: tl.constexpr):  # fmt: skip
    row, index = _index(G, R, V)
    end = (tl.program_id(0).to(tl.int64) + 1) * (R * G)
    message = tl.program_id(1).to(tl.int64)
    wire_ptr += message * wire_stride
    x = _decode_tile(wire_ptr, row, groups, tail, inv_root, low, high, G, R, V, FMT, HADAMARD,
                     FIELDS, NATIVE)  # fmt: skip
    if SUM:
        for _ in range(1, messages):
            wire_ptr += wire_stride
            x += _decode_tile(wire_ptr, row, groups, tail, inv_root, low, high, G, R, V, FMT,
                              HADAMARD, FIELDS, NATIVE)  # fmt: skip
    store_tile(out_ptr + message * out_stride, index, end, n, x)


@triton.jit(do_not_specialize=["groups", "tail", "messages"])
def _middle(wire_ptr, out_ptr, groups, tail, messages, wire_stride, target, inv_root, low, high,
            G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, FMT: tl.constexpr,
            HADAMARD: tl.constexpr, ALPHA: tl.constexpr, MERGE: tl.constexpr,
            ZERO: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
            NATIVE: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    row, _ = _index(G, R, V)
    FIELDS: tl.constexpr = 2 if ALPHA and not MERGE else 1
    x = _decode_tile(wire_ptr, row, groups, tail, inv_root, low, high, G, R, V, FMT, HADAMARD,
                     FIELDS, NATIVE)  # fmt: skip
    x = _rounded(x, ROUND)
    for _ in range(1, messages):
        wire_ptr += wire_stride
        part = _decode_tile(wire_ptr, row, groups, tail, inv_root, low, high, G, R, V, FMT,
                            HADAMARD, FIELDS, NATIVE)  # fmt: skip
        x += _rounded(part, ROUND)
    x = _rounded(x, ROUND)
    _encode_tile(x, out_ptr, row, groups, tail, target, inv_root, G, R, V, FMT, HADAMARD, ALPHA,
                 MERGE, ZERO, LIMIT, LOW, HIGH, NATIVE)  # fmt: skip


def _constants(layout: Layout, wire: Tensor) -> dict[str, Any]:
    """Return the compile-time constants that both directions share."""
    return {
        "warps": 1, "G": layout.group, "R": tile_rows(layout.group, _TILE), "V": _V,
        "FMT": _FORMAT_CODES[layout.fmt], "HADAMARD": layout.hadamard,
        "NATIVE": not layout.fmt.startswith("int") and has_fp8(wire.device),
    }  # fmt: skip


def _encoding(layout: Layout) -> dict[str, Any]:
    low, high = S_RANGE["int" if layout.fmt.startswith("int") else "fp8"]
    return {
        "ALPHA": layout.alpha, "MERGE": layout.merge, "ZERO": layout.zero,
        "LIMIT": FORMATS[layout.fmt], "LOW": low, "HIGH": high,
    }  # fmt: skip


def encode(x: Tensor, out: Tensor, groups: int, layout: Layout) -> None:
    """Encode x [N] into out [W] (see `reference.encode`)."""
    blocks = grid(groups, tile_rows(layout.group, _TILE))
    launch(
        _encode, (blocks,), pattern(x), out, x.numel(), groups, groups * layout.code_bytes,
        layout.target, inverse_root(layout.group), **_constants(layout, out), **_encoding(layout),
    )  # fmt: skip


def _run_decode(wires: Tensor, out: Tensor, groups: int, layout: Layout, total: bool) -> None:
    n = out.shape[-1]
    blocks = grid(n, tile_rows(layout.group, _TILE) * layout.group)
    launch(
        _decode, (blocks, 1 if total else len(wires)), wires, pattern(out), n, groups,
        groups * layout.code_bytes, len(wires), wires.stride(0), 0 if total else out.stride(0),
        inverse_root(layout.group), *layout.s_range, **_constants(layout, wires),
        FIELDS=layout.fields, SUM=total,
    )  # fmt: skip


def decode(wires: Tensor, out: Tensor, groups: int, layout: Layout) -> None:
    """Decode wires [R, W] into out [R, N] (see `reference.decode`)."""
    _run_decode(wires, out, groups, layout, False)


def decode_sum(wires: Tensor, out: Tensor, groups: int, layout: Layout) -> None:
    """Write the fp32 sum of wires [R, W], in rank order, into out [N]."""
    _run_decode(wires, out, groups, layout, True)


def decode_sum_encode(
    wires: Tensor, out: Tensor, groups: int, layout: Layout, middle: str, dtype: torch.dtype
) -> None:
    """Encode the sum of wires [R, W] into out [W] (see `reference.decode_sum_encode`)."""
    constants = _constants(layout, out)
    constants["HADAMARD"] = layout.hadamard and middle != "rotated"
    launch(
        _middle, (grid(groups, tile_rows(layout.group, _TILE)),), wires, out, groups,
        groups * layout.code_bytes, len(wires), wires.stride(0), layout.target,
        inverse_root(layout.group), *layout.s_range, **constants, **_encoding(layout),
        ROUND=_ROUNDINGS[dtype] if middle == "cast" else 0,
    )  # fmt: skip
