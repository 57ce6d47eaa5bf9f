"""Philox-4x32-10 for CPU kernels: equals `reference.py` bit for bit."""

from typing import Any

import numpy as np

from thinwire.kernels.parallel import inline, jit

__all__ = ["fill_uniform", "philox_block", "uniform"]

_U32, _U64 = np.uint32, np.uint64
_M0, _M1 = _U64(0xD2511F53), _U64(0xCD9E8D57)
_W0, _W1 = _U32(0x9E3779B9), _U32(0xBB67AE85)
_SCALE = np.float32(2.0**-24)


@inline
def philox_block(block: Any, step: Any, tensor: Any, key: Any) -> Any:
    """Return the four uint32 words of one counter."""
    c0, c1 = _U32(block), _U32(_U64(block) >> _U64(32))
    c2, c3 = _U32(step), _U32(tensor)
    k0, k1 = _U32(key), _U32(_U64(key) >> _U64(32))
    for _ in range(10):
        p0 = _M0 * _U64(c0)
        p1 = _M1 * _U64(c2)
        c0 = _U32(_U32(_U32(p1 >> _U64(32)) ^ c1) ^ k0)
        c2 = _U32(_U32(_U32(p0 >> _U64(32)) ^ c3) ^ k1)
        c1 = _U32(p1)
        c3 = _U32(p0)
        k0 = _U32(k0 + _W0)
        k1 = _U32(k1 + _W1)
    return c0, c1, c2, c3


@inline
def to_uniform(word: Any) -> Any:
    """Return a word as fp32 in [0, 1)."""
    return np.float32(_U32(word >> _U32(8))) * _SCALE


@jit
def fill_uniform(u: Any, count: Any, first: Any, key: Any, tensor: Any, step: Any) -> None:
    """Write the uniforms of flat indices first .. first + count - 1 into u[:count]."""
    head = min(count, (4 - first % 4) % 4)
    for i in range(head):
        u[i] = _one(first + i, key, tensor, step)
    blocks = (count - head) // 4
    base = (first + head) // 4
    body = u[head:]
    for j in range(blocks):
        w0, w1, w2, w3 = philox_block(_U64(base + j), step, tensor, key)
        body[4 * j] = to_uniform(w0)
        body[4 * j + 1] = to_uniform(w1)
        body[4 * j + 2] = to_uniform(w2)
        body[4 * j + 3] = to_uniform(w3)
    for i in range(head + 4 * blocks, count):
        u[i] = _one(first + i, key, tensor, step)


@inline
def _one(index: Any, key: Any, tensor: Any, step: Any) -> Any:
    w0, w1, w2, w3 = philox_block(_U64(index // 4), step, tensor, key)
    word = index % 4
    if word == 0:
        return to_uniform(w0)
    if word == 1:
        return to_uniform(w1)
    return to_uniform(w2) if word == 2 else to_uniform(w3)


@jit
def uniform(
    start: Any, stop: Any, u: Any, block_size: Any, first: Any, key: Any, tensor: Any, step: Any
) -> None:
    """Fill blocks start..stop of u (flat index of u[0] is `first`)."""
    for b in range(start, stop):
        begin = b * block_size
        count = min(block_size, u.size - begin)
        fill_uniform(u[begin:], count, first + begin, key, tensor, step)
