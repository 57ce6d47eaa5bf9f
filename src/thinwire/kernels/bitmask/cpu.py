"""Sets of positions as bits or 12-bit indices on the CPU: equals `reference.py`.

Work grows with the positions kept (or N/8 bytes), so one thread serves.
"""

from typing import Any

import numpy as np

from thinwire.kernels.parallel import jit

__all__ = ["from_bits", "from_index12", "to_bits", "to_index12"]

_U8 = np.uint8


@jit
def to_bits(index: Any, wire: Any) -> None:
    """Write positions as bits."""
    wire[:] = _U8(0)
    for j in range(index.size):
        i = index[j]
        wire[i >> 3] |= _U8(1 << (i & 7))


@jit
def from_bits(wire: Any, numel: Any, index: Any) -> Any:
    """Write the set positions; return their number, counted even where index is too short."""
    n = 0
    for q in range(wire.size):
        byte = wire[q]
        if byte != 0:
            for j in range(8):
                if (byte >> j) & 1:
                    i = 8 * q + j
                    if n < index.size and i < numel:
                        index[n] = i
                        n += 1
                    else:
                        return index.size + 1
    return n


@jit
def to_index12(index: Any, chunks: Any, wire: Any) -> None:
    """Write counts and 12-bit pairs."""
    counts = np.zeros(chunks, np.int64)
    at = 2 * chunks
    for j in range(index.size):
        i = index[j]
        counts[i >> 12] += 1
        low = i & 4095
        byte = at + 3 * (j >> 1)
        if j & 1:
            wire[byte + 1] |= _U8((low & 15) << 4)
            wire[byte + 2] = _U8(low >> 4)
        else:
            wire[byte] = _U8(low & 255)
            wire[byte + 1] = _U8(low >> 8)
    for c in range(chunks):
        wire[2 * c] = _U8(counts[c] & 255)
        wire[2 * c + 1] = _U8(counts[c] >> 8)


@jit
def from_index12(wire: Any, chunks: Any, numel: Any, index: Any) -> Any:
    """Write the positions; return False for what no encoder writes."""
    at = 2 * chunks
    j = 0
    last = np.int64(-1)
    for c in range(chunks):
        for _ in range(np.int64(wire[2 * c]) | (np.int64(wire[2 * c + 1]) << 8)):
            if j >= index.size:
                return False
            byte = at + 3 * (j >> 1)
            if j & 1:
                low = (np.int64(wire[byte + 1]) >> 4) | (np.int64(wire[byte + 2]) << 4)
            else:
                low = np.int64(wire[byte]) | ((np.int64(wire[byte + 1]) & 15) << 8)
            i = c * 4096 + low
            if i <= last or i >= numel:
                return False
            last = i
            index[j] = i
            j += 1
    return j == index.size
