"""Find the largest magnitudes of a chunk: a cheap floor first, then radix among few candidates."""

from typing import Any

import numpy as np

from thinwire.kernels.bits import at_least
from thinwire.kernels.parallel import inline

__all__ = ["select"]

_I32, _I64 = np.int32, np.int64
_INF_BITS = _I32(0x7F800000)
# Up to so many keys, comparing all pairs beats another histogram.
_FEW = 128


@inline
def _digit(
    keys: Any, count: Any, shift: Any, width: Any, prefix: Any, above: Any, need: Any, hist: Any
) -> Any:
    """Narrow the threshold by one digit among keys that share `prefix` above it.

    Return the longer prefix and how many of the keys sharing it are still needed.
    """
    hist[: 1 << width] = 0
    mask = _I32((1 << width) - 1)
    for i in range(count):
        if _I32(keys[i] >> _I32(above)) == prefix:
            hist[_I32(keys[i] >> _I32(shift)) & mask] += 1
    digit = (1 << width) - 1
    while hist[digit] < need:
        need -= hist[digit]
        digit -= 1
    return _I32(_I32(prefix << _I32(width)) | _I32(digit)), need


@inline
def _compact(keys: Any, count: Any, shift: Any, prefix: Any, out: Any) -> Any:
    n = 0
    for i in range(count):
        out[n] = keys[i]
        n += 1 if _I32(keys[i] >> _I32(shift)) == prefix else 0
    return n


@inline
def _leading(keys: Any, count: Any, k: Any, top: Any, hist: Any) -> Any:
    """Return the leading 11 bits of the k-th largest key, and its place among those that share it.

    `top` is at least the largest key.
    """
    digit = _I64(_I32(top >> _I32(20)))
    hist[: digit + 1] = 0
    for i in range(count):
        hist[_I32(keys[i] >> _I32(20))] += 1
    need = k
    while hist[digit] < need:
        need -= hist[digit]
        digit -= 1
    return _I32(digit), need


@inline
def _ranked(keys: Any, count: Any, need: Any) -> Any:
    """Return what `_threshold` does, by comparing every key with every other."""
    for i in range(count):
        key = keys[i]
        larger, equal = _I32(0), _I32(0)
        for j in range(count):
            larger += _I32(keys[j] > key)
            equal += _I32(keys[j] == key)
        if larger < need <= larger + equal:
            return key, _I64(need - larger)
    return keys[0], _I64(need)  # not reached: one of the keys has the rank


@inline
def _threshold(keys: Any, count: Any, k: Any, top: Any, hist: Any, ties: Any) -> Any:
    """Return the k-th largest key and how many keys equal to it belong to the k largest."""
    prefix, need = _leading(keys, count, k, top, hist)
    n = _compact(keys, count, 20, prefix, ties)
    if n <= _FEW:
        return _ranked(ties, n, need)
    prefix, need = _digit(ties, n, 10, 10, prefix, 20, need, hist)
    return _digit(ties, n, 0, 10, prefix, 10, need, hist)


@inline
def _floor(words: Any, count: Any, k: Any, keys: Any, hist: Any) -> Any:
    """Return the largest key and a lower bound of the k-th largest, close to it.

    The k-th largest of the maxima of disjoint sets of cells is such a bound; sets are columns of
    the chunk folded in eight rows, so that the maxima are SIMD code.
    """
    columns = count // 8
    if columns < 2 * k:
        columns = count
    for i in range(columns):
        keys[i] = _I32(words[i] & _I32(0x7FFFFFFF))
    for begin in range(columns, count, columns):
        for i in range(min(columns, count - begin)):
            keys[i] = max(keys[i], _I32(words[begin + i] & _I32(0x7FFFFFFF)))
    top = _I32(0)
    for i in range(columns):
        top = max(top, keys[i])
    if top >= _INF_BITS:
        return top, _I32(0)
    digit, _ = _leading(keys, columns, k, top, hist)
    return top, _I32(digit << _I32(20))


@inline
def select(words: Any, count: Any, k: Any, keys: Any, ties: Any, hist: Any, cells: Any) -> Any:
    """Write the k kept cells, ascending (the first k of a chunk with NaN or infinity: True)."""
    top, floor = _floor(words, count, k, keys, hist)
    if top >= _INF_BITS:
        for j in range(k):
            cells[j] = j
        return True
    found = at_least(words, 0, count, floor, cells, 0)
    if found > k:
        for j in range(found):
            keys[j] = _I32(words[cells[j]] & _I32(0x7FFFFFFF))
        threshold, equal = _threshold(keys, found, k, top, hist, ties)
        n = 0
        for j in range(found):
            cells[n] = cells[j]
            tied = keys[j] == threshold
            n += 1 if keys[j] > threshold or (tied and equal > 0) else 0
            equal -= 1 if tied else 0
    return False
