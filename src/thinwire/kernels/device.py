"""What the Triton kernels share: launches, 16-bit floats, packed codes, Philox.

Kernels must equal the plain references bit for bit, on a device and under Triton's interpreter:

- `launch` turns contraction of a*b + c into one rounding off; divisions and roots are the IEEE ones
  (`div_rn`, `sqrt_rn`).
- bf16 travels as its int16 pattern and is rounded by integer arithmetic, as on the CPU; FP8 too,
  except with `NATIVE`, which uses the instruction of devices from compute capability 9.0.
- A tile that lies within the tensor is loaded and stored without a mask, which keeps 16-byte
  accesses whatever the length is.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "RANDOM",
    "bf16_bits",
    "flip_sign",
    "floor_int",
    "fp8_code",
    "fp8_value",
    "grid",
    "has_fp8",
    "largest_bits",
    "launch",
    "load_bytes",
    "load_codes",
    "load_tile",
    "narrow",
    "pattern",
    "random_words",
    "round_even",
    "store_bytes",
    "store_codes",
    "store_tile",
    "tile_rows",
    "uniform_tile",
    "widen",
    "word_tile",
]

RANDOM = ["offset", "key_low", "key_high", "tensor", "step"]
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a small float, ties to even
_MAGIC_BITS = tl.constexpr(0x4B400000)
_INF_BITS = tl.constexpr(0x7F800000)


def launch(
    kernel: Any, blocks: tuple[int, ...], *args: Any, warps: int = 4, **constants: Any
) -> None:
    """Run `kernel` on the device of its first tensor, without contraction; nothing if empty."""
    if 0 in blocks:
        return
    device = next(a.device for a in args if isinstance(a, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[blocks](*args, num_warps=warps, enable_fp_fusion=False, **constants)


def grid(items: int, per_block: int) -> int:
    """Return how many blocks cover `items`."""
    return -(-items // per_block)


def tile_rows(size: int, elements: int) -> int:
    """Return how many rows of `size` make a tile of about `elements`."""
    return max(1, elements // size)


def pattern(x: Tensor) -> Tensor:
    """Return bf16 as its int16 pattern, other tensors as they are."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def has_fp8(device: torch.device) -> bool:
    """Tell whether the device converts fp32 to FP8 by one instruction.

    At compute capability 8.9 Triton goes through fp16, which rounds twice.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def random_words(key: int, tensor: int, step: int) -> tuple[int, int, int, int]:
    """Return a stream's words as signed 32-bit integers, so that one kernel serves all values."""
    words = (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF, tensor & 0xFFFFFFFF, step & 0xFFFFFFFF)
    low, high, name, number = (w - (1 << 32) if w >= 1 << 31 else w for w in words)
    return low, high, name, number


@triton.jit
def widen(x):
    """Return bf16 patterns, fp16 or fp32 as fp32, exactly."""
    if x.dtype == tl.int16:
        y = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def bf16_bits(x):
    """Return fp32 rounded to bf16, ties to even, as int32 in 0..65535."""
    u = x.to(tl.uint32, bitcast=True)
    rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    return tl.where((u & 0x7FFFFFFF) > _INF_BITS, 0x7FC0, rounded).to(tl.int32)


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """Return fp32 rounded to a tensor's element type (int16: a bf16 pattern)."""
    if tl.int16 == TYPE:
        y = bf16_bits(x).to(tl.int16)
    else:
        y = x.to(TYPE)
    return y


@triton.jit
def round_even(y):
    """Return |y| < 2^22 rounded to the nearest int32, ties to even."""
    return (y + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS


@triton.jit
def floor_int(y):
    """Return floor(y), |y| < 2^31, as int32; unlike the device's own it sees subnormals."""
    whole = y.to(tl.int32)
    return tl.where(whole.to(tl.float32) > y, whole - 1, whole)


@triton.jit
def flip_sign(x, negative):
    """Return -x where `negative` (0 or 1) is set; Triton's own minus is 0 - x, which loses -0."""
    return (x.to(tl.int32, bitcast=True) ^ (negative.to(tl.int32) << 31)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def largest_bits(x, AXIS: tl.constexpr):
    """Return the largest |x| as int32 bits; infinity and NaN are 0x7F800000 and above."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def _fp8_bits(y, DROP: tl.constexpr, BIAS: tl.constexpr, MAGIC: tl.constexpr):
    """Return the magnitude code of |y| in a float format with 23 - DROP mantissa bits, to even."""
    u = y.to(tl.uint32, bitcast=True)
    a = u & 0x7FFFFFFF
    normal = ((a + ((1 << (DROP - 1)) - 1) + ((a >> DROP) & 1)) >> DROP) - (BIAS << (23 - DROP))
    # Below the smallest normal number a sum whose last place is the smallest subnormal rounds.
    base = tl.full([], MAGIC, tl.float32)
    small = (a.to(tl.float32, bitcast=True) + base).to(tl.uint32, bitcast=True)
    small -= base.to(tl.uint32, bitcast=True)
    return tl.where(a < ((BIAS + 1) << 23), small, normal).to(tl.int32) | ((u >> 24) & 0x80).to(
        tl.int32
    )


@triton.jit
def fp8_code(y, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Return fp32 within the format's limits as an FP8 byte (int32), ties to even."""
    if NATIVE:
        if E4M3:
            c = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            c = y.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    elif E4M3:
        c = _fp8_bits(y, 20, 120, 16384.0)
    else:
        c = _fp8_bits(y, 21, 112, 128.0)
    return c


@triton.jit
def fp8_value(c, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Return an FP8 byte (int32) as fp32; codes that are not finite are the caller's."""
    if NATIVE:
        if E4M3:
            x = c.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            x = c.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        DROP: tl.constexpr = 20 if E4M3 else 21
        BIAS: tl.constexpr = 120 if E4M3 else 112
        ULP: tl.constexpr = 2.0**-9 if E4M3 else 2.0**-16
        a = c & 0x7F
        small = (a.to(tl.float32) * ULP).to(tl.int32, bitcast=True)
        magnitude = tl.where(a >= (1 << (23 - DROP)), (a << DROP) + (BIAS << 23), small)
        x = (magnitude | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)
    return x


@triton.jit
def load_tile(ptr, index, end, n):
    """Load x[index] as fp32, zero from n on; `end` is one beyond the tile's last index."""
    if end <= n:
        x = tl.load(ptr + index)
    else:
        x = tl.load(ptr + index, mask=index < n, other=0)
    return widen(x)


@triton.jit
def store_tile(ptr, index, end, n, x):
    """Store fp32 x, rounded to the tensor's type, at the indices below n."""
    y = narrow(x, ptr.dtype.element_ty)
    if end <= n:
        tl.store(ptr + index, y)
    else:
        tl.store(ptr + index, y, mask=index < n)


@triton.jit
def store_codes(ptr, q, mask, ROWS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
                WORDS: tl.constexpr):  # fmt: skip
    """Pack codes int32 [ROWS, G] to bytes at row pointers [ROWS, 1], element 0 lowest.

    WORDS: pointers are multiples of 4, so that 6-bit codes go out as words in place of bytes.
    """
    if BITS == 8:
        tl.store(ptr + tl.arange(0, G)[None, :], q.to(tl.uint8), mask=mask)
    elif BITS == 6:
        if WORDS:
            halves = tl.reshape(q.to(tl.int64), [ROWS, G // 16, 2, 8])
            halves = tl.sum(halves << (6 * tl.arange(0, 8)).to(tl.int64)[None, None, None, :], 3)
            low, high = tl.split(halves)
            at = ptr.to(tl.pointer_type(tl.int32)) + 3 * tl.arange(0, G // 16)[None, :]
            tl.store(at, low.to(tl.int32), mask=mask)
            tl.store(at + 1, ((low >> 32) | (high << 16)).to(tl.int32), mask=mask)
            tl.store(at + 2, (high >> 16).to(tl.int32), mask=mask)
        else:
            word = tl.reshape(q, [ROWS, G // 4, 4])
            word = tl.sum(word << (6 * tl.arange(0, 4))[None, None, :], 2)
            at = ptr + 3 * tl.arange(0, G // 4)[None, :]
            tl.store(at, word.to(tl.uint8), mask=mask)
            tl.store(at + 1, (word >> 8).to(tl.uint8), mask=mask)
            tl.store(at + 2, (word >> 16).to(tl.uint8), mask=mask)
    else:
        PER: tl.constexpr = 8 // BITS
        byte = tl.reshape(q, [ROWS, G // PER, PER])
        byte = tl.sum(byte << (BITS * tl.arange(0, PER))[None, None, :], 2)
        tl.store(ptr + tl.arange(0, G // PER)[None, :], byte.to(tl.uint8), mask=mask)


@triton.jit
def load_codes(ptr, mask, ROWS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
               WORDS: tl.constexpr):  # fmt: skip
    """Return codes int32 [ROWS, G] from row pointers [ROWS, 1]: inverts `store_codes`."""
    if BITS == 8:
        q = tl.load(ptr + tl.arange(0, G)[None, :], mask=mask, other=0).to(tl.int32)
    elif BITS == 6:
        if WORDS:
            at = ptr.to(tl.pointer_type(tl.int32)) + 3 * tl.arange(0, G // 16)[None, :]
            w0 = tl.load(at, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            w1 = tl.load(at + 1, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            w2 = tl.load(at + 2, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            word = tl.join(w0 | ((w1 & 0xFFFF) << 32), (w1 >> 16) | (w2 << 16))
            shift = (6 * tl.arange(0, 8)).to(tl.int64)[None, None, None, :]
            q = ((word[:, :, :, None] >> shift) & 63).to(tl.int32)
        else:
            at = ptr + 3 * tl.arange(0, G // 4)[None, :]
            word = tl.load(at, mask=mask, other=0).to(tl.int32)
            word |= tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 8
            word |= tl.load(at + 2, mask=mask, other=0).to(tl.int32) << 16
            q = (word[:, :, None] >> (6 * tl.arange(0, 4))[None, None, :]) & 63
    else:
        PER: tl.constexpr = 8 // BITS
        byte = tl.load(ptr + tl.arange(0, G // PER)[None, :], mask=mask, other=0).to(tl.int32)
        q = (byte[:, :, None] >> (BITS * tl.arange(0, PER))[None, None, :]) & (2**BITS - 1)
    return tl.reshape(q, [ROWS, G])


@triton.jit
def load_bytes(ptr, mask, COUNT: tl.constexpr):
    """Return a little-endian word of COUNT bytes at pointers of any alignment, as int32."""
    word = tl.load(ptr, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, COUNT):
        word |= tl.load(ptr + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def store_bytes(ptr, word, mask, COUNT: tl.constexpr):
    """Store the COUNT low bytes of an int32 word at pointers of any alignment."""
    for i in tl.static_range(COUNT):
        tl.store(ptr + i, (word >> (8 * i)).to(tl.uint8), mask=mask)


@triton.jit
def philox(block, key_low, key_high, tensor, step):
    """Return the four uint32 words of int64 counter blocks (see kernels/random)."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + step.to(tl.uint32), tl.zeros_like(c0) + tensor.to(tl.uint32)
    k0, k1 = key_low.to(tl.uint32), key_high.to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def word_tile(first, ROWS: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr,
              key_low, key_high, tensor, step):  # fmt: skip
    """Return the uint32 words [ROWS, G] of flat indices first .. first + G - 1, first [ROWS, 1].

    ALIGNED: every `first` is a multiple of 4, so that one counter gives four neighbours.
    """
    if ALIGNED:
        block = (first >> 2) + tl.arange(0, G // 4)[None, :]
        w0, w1, w2, w3 = philox(block, key_low, key_high, tensor, step)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [ROWS, G])
    else:
        index = first + tl.arange(0, G)[None, :]
        w0, w1, w2, w3 = philox(index >> 2, key_low, key_high, tensor, step)
        place = index & 3
        word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    return word


@triton.jit
def uniform_tile(first, ROWS: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr,
                 key_low, key_high, tensor, step):  # fmt: skip
    """Return uniforms fp32 [ROWS, G] in [0, 1): see `word_tile`."""
    word = word_tile(first, ROWS, G, ALIGNED, key_low, key_high, tensor, step)
    return (word >> 8).to(tl.float32) * (2.0**-24)
