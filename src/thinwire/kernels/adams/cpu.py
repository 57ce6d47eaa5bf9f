"""AdamS and SCAPE's sweep on CPU threads: equals `reference.py` bit for bit."""

from typing import Any

import numpy as np

from thinwire.kernels.bits import at_least, load_block
from thinwire.kernels.parallel import inline, jit

__all__ = ["adams", "candidates", "gather", "sweep"]

_F32 = np.float32
_ZERO, _ONE = _F32(0.0), _F32(1.0)


@inline
def _move(theta: Any, m: Any, v: Any, lr: Any, eps: Any) -> Any:
    return theta - (lr * m) / (np.sqrt(v) + eps)


@jit
def adams(start: Any, stop: Any, theta: Any, m: Any, g: Any, dtype: Any, size: Any, h: Any) -> None:
    """Take a dense step on blocks start..stop."""
    lr, b1, a1, b2, a2, eps, decay, _, _ = h
    buf = np.empty(size, np.float32)
    for b in range(start, stop):
        begin = b * size
        count = min(size, m.size - begin)
        load_block(g, dtype, begin, count, buf)
        th, mm = theta[begin : begin + count], m[begin : begin + count]
        for i in range(count):
            old = mm[i]
            v = b2 * (old * old) + a2 * (buf[i] * buf[i])
            new = b1 * old + a1 * buf[i]
            mm[i] = new
            th[i] = _move(decay * th[i], new, v, lr, eps)


@jit
def gather(
    start: Any,
    stop: Any,
    m: Any,
    g: Any,
    dtype: Any,
    r: Any,
    index: Any,
    out: Any,
    b1: Any,
    a1: Any,
) -> None:
    """Write the sent values of mask entries start..stop."""
    one = np.empty(1, np.float32)
    for j in range(start, stop):
        i = index[j]
        if dtype == 0:
            out[j] = ((b1 * m[i]) + a1 * _F32(g[i])) + r[i]
        else:
            load_block(g, dtype, i, 1, one)
            out[j] = ((b1 * m[i]) + a1 * one[0]) + r[i]


@inline
def _on_mask(
    theta: Any,
    m: Any,
    index: Any,
    mean: Any,
    first: Any,
    count: Any,
    h: Any,
    new_m: Any,
    new_th: Any,
) -> None:
    """Compute the moments and weights of mask entries first .. first + count - 1."""
    lr, b1, a1, b2, a2, eps, decay, _, clip = h
    for j in range(count):
        i = index[first + j]
        old, p = m[i], mean[first + j]
        gradient = (p - b1 * old) / a1
        if clip != _ONE:
            gradient = clip * gradient
            p = b1 * old + a1 * gradient
        v = b2 * (old * old) + a2 * (gradient * gradient)
        new_m[j] = p
        if theta.size > 0:
            new_th[j] = _move(decay * theta[i], p, v, lr, eps)


@inline
def _off_mask(theta: Any, m: Any, g: Any, r: Any, count: Any, h: Any) -> None:
    _, b1, a1, _, _, _, decay, transfer, _ = h
    if transfer:
        for i in range(count):
            r[i] = ((b1 * m[i]) + a1 * g[i]) + r[i]
            m[i] = _ZERO
    else:
        for i in range(count):
            r[i] = a1 * g[i] + r[i]
            m[i] = b1 * m[i]
    if decay != _ONE:
        for i in range(theta.size):
            theta[i] = decay * theta[i]


@jit
def sweep(
    start: Any,
    stop: Any,
    theta: Any,
    m: Any,
    g: Any,
    dtype: Any,
    r: Any,
    index: Any,
    mean: Any,
    kept: Any,
    statistic: Any,
    size: Any,
    h: Any,
) -> None:
    """Apply the step to blocks start..stop; empty theta, kept or statistic are left out."""
    buf = np.empty(size, np.float32)
    new_m, new_th = np.empty(size, np.float32), np.empty(size, np.float32)
    first = np.searchsorted(index, start * size)
    b1 = h[1]
    for b in range(start, stop):
        begin = b * size
        count = min(size, m.size - begin)
        last = first
        while last < index.size and index[last] < begin + count:
            last += 1
        _on_mask(theta, m, index, mean, first, last - first, h, new_m, new_th)
        load_block(g, dtype, begin, count, buf)
        mm, rr, th = (
            m[begin : begin + count],
            r[begin : begin + count],
            theta[begin : begin + count],
        )
        _off_mask(th, mm, buf, rr, count, h)
        for j in range(first, last):
            i = index[j] - begin
            mm[i] = new_m[j - first]
            rr[i] = kept[j] if kept.size > 0 else _ZERO
            if theta.size > 0:
                th[i] = new_th[j - first]
        if statistic.size > 0:
            out = statistic[begin : begin + count]
            for i in range(count):
                out[i] = abs(b1 * mm[i] + rr[i])
        first = last


@jit
def candidates(start: Any, stop: Any, x: Any, size: Any, floor: Any, room: Any) -> Any:
    """Return the positions in blocks start..stop with |x| >= floor, and how many there are.

    Only the first `room` are returned.
    """
    out = np.empty(room, np.int64)
    begin = start * size
    count = min(stop * size, x.size) - begin
    n = at_least(x.view(np.int32), begin, count, floor, out, 0)
    out = out[: min(n, room)]
    for j in range(out.size):
        out[j] += begin
    return out, n
