"""Block quantization on CUDA: equals `reference.py` bit for bit.

One program holds whole blocks in registers: a block is read once, its codes are written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.blockwise.reference import meta_nbytes
from thinwire.kernels.device import (
    RANDOM,
    bf16_bits,
    floor_int,
    grid,
    largest_bits,
    launch,
    load_bytes,
    load_codes,
    pattern,
    random_words,
    round_even,
    store_bytes,
    store_codes,
    store_tile,
    tile_rows,
    uniform_tile,
    widen,
)

__all__ = ["decode", "decode_sum", "encode"]

_INF = tl.constexpr(float("inf"))


@triton.jit
def _to_meta(x, BF16: tl.constexpr):
    if BF16:
        h = bf16_bits(x)
    else:
        h = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return h


@triton.jit
def _from_meta(h, BF16: tl.constexpr):
    if BF16:
        x = (h << 16).to(tl.float32, bitcast=True)
    else:
        x = h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _block_meta(x, TOP: tl.constexpr, BF16: tl.constexpr, SYM: tl.constexpr):
    """Return patterns of scale and minimum, int32 [ROWS], and which blocks cannot be coded."""
    top = largest_bits(x, 1)
    if SYM:
        hi = top.to(tl.float32, bitcast=True)
        z = tl.zeros_like(top)
    else:
        hi = tl.max(x, 1)
        z = _to_meta(tl.min(x, 1), BF16)
        z = tl.where(z == 0x8000, 0, z)  # minus zero is stored as zero
    minimum = _from_meta(z, BF16)
    s = _to_meta(tl.div_rn(hi - minimum, TOP), BF16)
    s = tl.where(_from_meta(s, BF16) * TOP + minimum < hi, s + 1, s)
    s = tl.where(_from_meta(s, BF16) <= 0, 1, s)
    scale = tl.abs(_from_meta(s, BF16))
    largest = tl.abs(_from_meta(_to_meta(hi, BF16), BF16))
    ok = (top < 0x7F800000) & (scale < _INF) & (largest < _INF) & (tl.abs(minimum) < _INF)
    return s, z, ok


@triton.jit(do_not_specialize=["n", "blocks", "head", *RANDOM])
def _encode(x_ptr, out_ptr, n, blocks, head, offset, key_low, key_high, tensor, step,
            G: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr,
            BF16: tl.constexpr, SYM: tl.constexpr, SR: tl.constexpr, ALIGNED: tl.constexpr,
            WORDS: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = 2 ** (BITS - 1) - 1 if SYM else 0
    TOP: tl.constexpr = 2 * HALF if SYM else 2**BITS - 1
    WIDTH: tl.constexpr = G * BITS // 8
    META: tl.constexpr = 2 if SYM else 4
    begin = tl.program_id(0).to(tl.int64) * ROWS
    row = begin + tl.arange(0, ROWS)
    index = row[:, None] * G + tl.arange(0, G)[None, :]
    if (begin + ROWS) * G <= n:
        x = widen(tl.load(x_ptr + index))
    else:  # padded with the last valid value
        x = widen(tl.load(x_ptr + tl.minimum(index, n - 1)))
    s, z, ok = _block_meta(x, TOP - HALF, BF16, SYM)
    scale = tl.where(ok, _from_meta(s, BF16), 1.0)
    y = tl.div_rn(x - tl.where(ok, _from_meta(z, BF16), 0.0)[:, None], scale[:, None])
    if SR:
        first = (offset + row * G)[:, None]
        u = uniform_tile(first, ROWS, G, ALIGNED, key_low, key_high, tensor, step)
        q = tl.minimum(tl.maximum(floor_int(y + u), -HALF), TOP - HALF) + HALF
    else:
        q = round_even(tl.minimum(tl.maximum(y, -HALF), TOP - HALF)) + HALF
    q = tl.where(ok[:, None], q, 0)
    FLAG: tl.constexpr = 0x7FC0 if BF16 else 0x7E00  # NaN; a device's own cast gives another
    mask = row < blocks
    if SPLIT:
        payload = out_ptr + row * WIDTH
        meta = out_ptr + head + row * META
    else:
        payload = out_ptr + row * (WIDTH + META)
        meta = payload + WIDTH
    store_codes(payload[:, None], q, mask[:, None], ROWS, G, BITS, WORDS)
    if SYM:
        store_bytes(meta, tl.where(ok, s, FLAG), mask, 2)
    else:
        store_bytes(meta, tl.where(ok, s | (z << 16), FLAG << 16), mask, 4)


@triton.jit
def _values(wire_ptr, row, blocks, head, G: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
            SPLIT: tl.constexpr, BF16: tl.constexpr, SYM: tl.constexpr,
            WORDS: tl.constexpr):  # fmt: skip
    """Return blocks `row` of one message as fp32 [ROWS, G]."""
    HALF: tl.constexpr = 2 ** (BITS - 1) - 1 if SYM else 0
    TOP: tl.constexpr = 2 * HALF if SYM else 2**BITS - 1
    WIDTH: tl.constexpr = G * BITS // 8
    META: tl.constexpr = 2 if SYM else 4
    if SPLIT:
        payload = wire_ptr + row * WIDTH
        meta = wire_ptr + head + row * META
    else:
        payload = wire_ptr + row * (WIDTH + META)
        meta = payload + WIDTH
    mask = row < blocks
    q = load_codes(payload[:, None], mask[:, None], ROWS, G, BITS, WORDS) - HALF
    word = load_bytes(meta, mask, META)
    s = _from_meta(word & 0xFFFF, BF16)
    z = tl.zeros_like(s)
    if not SYM:
        z = _from_meta((word >> 16) & 0xFFFF, BF16)
    good = tl.abs(z + s * TOP) < _INF
    s = tl.where(good, s, 0.0)
    z = tl.where(good, z, float("nan"))
    return z[:, None] + s[:, None] * q.to(tl.float32)


@triton.jit(do_not_specialize=["n", "blocks", "head", "messages"])
def _decode(wire_ptr, out_ptr, n, blocks, head, messages, wire_stride, out_stride,
            G: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr,
            BF16: tl.constexpr, SYM: tl.constexpr, WORDS: tl.constexpr,
            SUM: tl.constexpr):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * ROWS
    row = begin + tl.arange(0, ROWS)
    index = row[:, None] * G + tl.arange(0, G)[None, :]
    message = tl.program_id(1).to(tl.int64)
    wire_ptr += message * wire_stride
    x = _values(wire_ptr, row, blocks, head, G, ROWS, BITS, SPLIT, BF16, SYM, WORDS)
    if SUM:
        for _ in range(1, messages):
            wire_ptr += wire_stride
            x += _values(wire_ptr, row, blocks, head, G, ROWS, BITS, SPLIT, BF16, SYM, WORDS)
    store_tile(out_ptr + message * out_stride, index, (begin + ROWS) * G, n, x)


def _shape(
    wires: Tensor, num_blocks: int, block_size: int, bits: int, layout: str, symmetric: bool
) -> tuple[int, int, bool]:
    """Return rows per tile, warps, and whether the payload may be read and written as words."""
    rows = tile_rows(block_size, 2048)
    width = block_size * bits // 8
    step = width if layout == "split" else width + meta_nbytes(symmetric)
    steps = (wires.data_ptr(), step, wires.stride(0) if wires.dim() == 2 else 0)
    return rows, 8 if block_size > 2048 else 4, all(s % 4 == 0 for s in steps)


def encode(
    x: Tensor,
    out: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
    stochastic: bool,
    key: int,
    tensor: int,
    step: int,
    offset: int,
) -> None:
    """Encode x [N] into out [W] (see `reference.encode`)."""
    rows, warps, words = _shape(out, num_blocks, block_size, bits, layout, symmetric)
    x = pattern(x if x.numel() else x.new_zeros(1))
    head = num_blocks * block_size * bits // 8
    launch(
        _encode, (grid(num_blocks, rows),), x, out, x.numel(), num_blocks, head, offset,
        *random_words(key, tensor, step), warps=warps, G=block_size, ROWS=rows, BITS=bits,
        SPLIT=layout == "split", BF16=meta == "bf16", SYM=symmetric, SR=stochastic,
        ALIGNED=offset % 4 == 0, WORDS=words,
    )  # fmt: skip


def _run_decode(
    wires: Tensor,
    out: Tensor,
    total: bool,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
) -> None:
    rows, warps, words = _shape(wires, num_blocks, block_size, bits, layout, symmetric)
    n, head = out.shape[-1], num_blocks * block_size * bits // 8
    out_stride = 0 if total else out.stride(0)
    launch(
        _decode, (grid(n, rows * block_size), 1 if total else len(wires)), wires, pattern(out), n,
        num_blocks, head, len(wires), wires.stride(0), out_stride, warps=warps, G=block_size,
        ROWS=rows, BITS=bits, SPLIT=layout == "split", BF16=meta == "bf16", SYM=symmetric,
        WORDS=words, SUM=total,
    )  # fmt: skip


def decode(
    wires: Tensor,
    out: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
) -> None:
    """Decode wires [R, W] into out [R, N] (see `reference.decode`)."""
    _run_decode(wires, out, False, num_blocks, block_size, bits, layout, meta, symmetric)


def decode_sum(
    wires: Tensor,
    out: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
) -> None:
    """Write the fp32 sum of wires [R, W], in rank order, into out [N]."""
    _run_decode(wires, out, True, num_blocks, block_size, bits, layout, meta, symmetric)
