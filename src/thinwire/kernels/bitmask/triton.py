"""Sets of positions as bits or 12-bit indices on CUDA: equals `reference.py`.

Reading refuses what no encoder writes, which takes one look at a number on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels.bitmask.reference import CHUNK
from thinwire.kernels.device import grid, launch, load_bytes, store_bytes

__all__ = ["from_bits", "from_index12", "to_bits", "to_index12"]

_BLOCK = 1024
_TILE = 512  # bytes of the bit form per program


@triton.jit(do_not_specialize=["k"])
def _set_bits(index_ptr, word_ptr, k, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.load(index_ptr + j, mask=j < k, other=0)
    one = tl.full([BLOCK], 1, tl.int32) << (bit & 31).to(tl.int32)
    tl.atomic_or(word_ptr + (bit >> 5), one, mask=j < k, sem="relaxed")


@triton.jit(do_not_specialize=["wire_ptr", "nbytes"])
def _count_bits(wire_ptr, count_ptr, nbytes, TILE: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * TILE
    q = begin + tl.arange(0, TILE)
    byte = tl.load(wire_ptr + q, mask=q < nbytes, other=0).to(tl.int32)
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    byte = (byte + (byte >> 4)) & 0x0F
    tl.store(count_ptr + tl.program_id(0), tl.sum(byte, 0).to(tl.int64))


@triton.jit(do_not_specialize=["wire_ptr", "nbytes", "k"])
def _list_bits(wire_ptr, end_ptr, index_ptr, nbytes, k, TILE: tl.constexpr):
    """Write the positions of set bits; end_ptr holds how many there are up to each tile's end."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    q = begin + tl.arange(0, TILE)
    byte = tl.load(wire_ptr + q, mask=q < nbytes, other=0).to(tl.int32)
    bits = (byte[:, None] >> tl.arange(0, 8)[None, :]) & 1
    bits = tl.reshape(bits, [TILE * 8])
    rank = tl.cumsum(bits, 0)
    place = tl.load(end_ptr + tl.program_id(0)) - tl.sum(bits, 0) + rank - bits
    position = begin * 8 + tl.arange(0, TILE * 8)
    tl.store(index_ptr + place, position, mask=(bits == 1) & (place < k))


@triton.jit
def _bound(ptr, value, size, rounds, BLOCK: tl.constexpr):
    """Return how many of the ascending ptr[0:size] are below each value [BLOCK]."""
    low = tl.zeros([BLOCK], tl.int64)
    high = tl.zeros([BLOCK], tl.int64) + size
    for _ in range(rounds):
        middle = (low + high) >> 1
        open_ = low < high
        below = tl.load(ptr + middle, mask=open_, other=0) < value
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["out_ptr", "k", "chunks", "rounds"])
def _write_counts(index_ptr, out_ptr, k, chunks, rounds, BLOCK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = _bound(index_ptr, (chunk + 1) * 4096, k, rounds, BLOCK)
    count -= _bound(index_ptr, chunk * 4096, k, rounds, BLOCK)
    store_bytes(out_ptr + 2 * chunk, count.to(tl.int32), chunk < chunks, 2)


@triton.jit(do_not_specialize=["out_ptr", "k", "head"])
def _write_pairs(index_ptr, out_ptr, k, head, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(index_ptr + 2 * pair, mask=2 * pair < k, other=0).to(tl.int32) & 4095
    b = tl.load(index_ptr + 2 * pair + 1, mask=2 * pair + 1 < k, other=0).to(tl.int32) & 4095
    at = out_ptr + head + 3 * pair
    store_bytes(at, a | (b << 12), 2 * pair < k, 2)
    tl.store(at + 2, (b >> 4).to(tl.uint8), mask=2 * pair + 1 < k)


@triton.jit(do_not_specialize=["wire_ptr", "chunks"])
def _read_counts(wire_ptr, count_ptr, chunks, BLOCK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = load_bytes(wire_ptr + 2 * chunk, chunk < chunks, 2)
    tl.store(count_ptr + chunk, count.to(tl.int64), mask=chunk < chunks)


@triton.jit
def _local(wire_ptr, head, j, mask):
    """Return the 12-bit index j of the body that starts at byte `head`."""
    word = load_bytes(wire_ptr + head + 3 * (j // 2) + (j % 2), mask, 2)
    return tl.where(j % 2 == 0, word & 0xFFF, word >> 4)


@triton.jit(do_not_specialize=["wire_ptr", "k", "head", "n"])
def _read_pairs(wire_ptr, end_ptr, index_ptr, bad_ptr, k, head, n, BLOCK: tl.constexpr):
    """Write a chunk's positions; end_ptr holds how many there are up to each chunk's end."""
    chunk = tl.program_id(0).to(tl.int64)
    first = tl.load(end_ptr + chunk - 1, mask=chunk > 0, other=0)
    last = tl.minimum(tl.load(end_ptr + chunk), k)
    for begin in range(first, last, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        used = j < last
        local = _local(wire_ptr, head, j, used)
        before = _local(wire_ptr, head, j - 1, used & (j > first))
        position = chunk * 4096 + local
        wrong = used & (((j > first) & (local <= before)) | (position >= n))
        tl.store(index_ptr + j, position, mask=used)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            tl.store(bad_ptr, 1)


def to_bits(index: Tensor, numel: int, out: Tensor) -> None:
    """Write positions int64 [K], ascending, as bits into uint8 out [ceil(numel/8)]."""
    # Atomic operations need whole words, which a message need not start or end with.
    words = torch.zeros(grid(out.numel(), 4), dtype=torch.int32, device=out.device)
    k = index.numel()
    launch(_set_bits, (grid(k, _BLOCK),), index, words, k, BLOCK=_BLOCK)
    out.copy_(words.view(torch.uint8)[: out.numel()])


def from_bits(wire: Tensor, numel: int, k: int) -> Tensor:
    """Return positions int64 [k] of a bit form.

    Raises:
        WireError: another number of bits is set, or one beyond numel.
    """
    tiles = grid(wire.numel(), _TILE)
    counts = torch.zeros(max(tiles, 1), dtype=torch.int64, device=wire.device)
    launch(_count_bits, (tiles,), wire, counts, wire.numel(), TILE=_TILE)
    ends = counts.cumsum(0)
    index = torch.empty(k, dtype=torch.int64, device=wire.device)
    launch(_list_bits, (tiles,), wire, ends, index, wire.numel(), k, TILE=_TILE)
    wrong = ends[-1] != k
    if numel % 8:
        wrong = wrong | ((wire[-1] >> (numel % 8)) != 0)
    if wrong:
        raise WireError(f"a bit mask of {numel} elements must have exactly {k} of them set")
    return index


def to_index12(index: Tensor, numel: int, out: Tensor) -> None:
    """Write positions int64 [K], ascending, as 12-bit indices into out [index12_nbytes]."""
    k, chunks = index.numel(), grid(numel, CHUNK)
    launch(
        _write_counts, (grid(chunks, _BLOCK),), index, out, k, chunks, k.bit_length(), BLOCK=_BLOCK
    )
    launch(_write_pairs, (grid(grid(k, 2), _BLOCK),), index, out, k, 2 * chunks, BLOCK=_BLOCK)


def from_index12(wire: Tensor, numel: int, k: int) -> Tensor:
    """Return positions int64 [k] of an index form.

    Raises:
        WireError: counts that do not add up, or positions out of order or beyond numel.
    """
    chunks = grid(numel, CHUNK)
    counts = torch.zeros(max(chunks, 1), dtype=torch.int64, device=wire.device)
    launch(_read_counts, (grid(chunks, _BLOCK),), wire, counts, chunks, BLOCK=_BLOCK)
    ends = counts.cumsum(0)
    index = torch.empty(k, dtype=torch.int64, device=wire.device)
    bad = torch.zeros(1, dtype=torch.int32, device=wire.device)
    launch(_read_pairs, (chunks,), wire, ends, index, bad, k, 2 * chunks, numel, BLOCK=256, warps=1)
    if (bad[0] != 0) | (ends[-1] != k):
        raise WireError(f"an index mask of {numel} elements does not hold {k} ascending positions")
    return index
