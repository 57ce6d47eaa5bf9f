"""AdamS, SCAPE's sweep and the selection of its masks, picked by device; flat tensors.

Moments, residuals and weights are fp32; gradients fp32, bf16 or fp16.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.kernels.adams.reference import Step
from thinwire.kernels.parallel import DTYPE_CODES, array, backend, run

__all__ = ["Step", "adams_", "gather", "largest", "sweep_"]

_PACKAGE = "thinwire.kernels.adams"
_BLOCK = 2048
_NONE = np.empty(0, np.float32)
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Elements that the floor of a selection is guessed from.
_SAMPLE = 65536


def _constants(h: Step) -> tuple[Any, ...]:
    f32 = np.float32
    return (
        f32(h.lr), f32(h.b1), f32(1 - h.b1), f32(h.b2), f32(1 - h.b2), f32(h.eps), f32(h.decay),
        h.transfer, f32(h.clip),
    )  # fmt: skip


def _flat(name: str, x: Tensor, numel: int) -> Tensor:
    """Return a contiguous fp32 state tensor as [N]."""
    if x.dtype != torch.float32 or not x.is_contiguous() or x.numel() != numel:
        raise ConfigError(
            f"{name} must be contiguous fp32 with {numel} elements, got {x.dtype} {tuple(x.shape)}"
        )
    return x.view(-1)


def _blocks(numel: int) -> int:
    return -(-numel // _BLOCK)


def adams_(theta: Tensor, exp_avg: Tensor, grad: Tensor, h: Step) -> None:
    """Take a dense AdamS step in place on fp32 theta and exp_avg (any shape, contiguous)."""
    n = grad.numel()
    theta, exp_avg = _flat("theta", theta, n), _flat("exp_avg", exp_avg, n)
    g = grad.reshape(-1)
    if g.device.type == "cuda":
        backend(_PACKAGE, "triton").adams(theta, exp_avg, g, h)
        return
    kernel = backend(_PACKAGE, "cpu").adams
    arrays = array(theta), array(exp_avg), array(g)
    run(kernel, _blocks(n), n, *arrays, DTYPE_CODES[g.dtype], _BLOCK, _constants(h))


def gather(
    exp_avg: Tensor,
    grad: Tensor,
    residual: Tensor,
    index: Tensor,
    b1: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x = ((b1*m) + (1-b1)*g) + r fp32 [K] at the mask's positions (int64, ascending)."""
    n = grad.numel()
    m, r = _flat("exp_avg", exp_avg, n), _flat("residual", residual, n)
    if out is None:
        out = torch.empty(index.numel(), dtype=torch.float32, device=grad.device)
    g = grad.reshape(-1)
    if g.device.type == "cuda":
        backend(_PACKAGE, "triton").gather(m, g, r, index, b1, out)
        return out
    kernel, b = backend(_PACKAGE, "cpu").gather, np.float32
    run(
        kernel, index.numel(), index.numel(), array(m), array(g), DTYPE_CODES[g.dtype], array(r),
        array(index), array(out), b(b1), b(1 - b1),
    )  # fmt: skip
    return out


def sweep_(
    theta: Tensor | None,
    exp_avg: Tensor,
    grad: Tensor,
    residual: Tensor,
    index: Tensor,
    mean: Tensor,
    kept: Tensor | None,
    h: Step,
    *,
    statistic: Tensor | None = None,
) -> None:
    """Apply one SCAPE step in place, one pass over the data (see `reference.sweep`).

    Args:
        theta: fp32 weights, or None where another rank owns them.
        exp_avg: fp32 first moments.
        grad: local gradient.
        residual: fp32 residual.
        index: mask positions int64 [K], ascending.
        mean: fp32 mean of the sent values [K].
        kept: fp32, what rounding to the wire held back [K]; None: zero.
        h: constants.
        statistic: None, or fp32 [N] for the next mask's statistic |b1*m' + r'|.
    """
    n = grad.numel()
    m, r, g = _flat("exp_avg", exp_avg, n), _flat("residual", residual, n), grad.reshape(-1)
    th = None if theta is None else _flat("theta", theta, n)
    stat = None if statistic is None else _flat("statistic", statistic, n)
    if g.device.type == "cuda":
        backend(_PACKAGE, "triton").sweep(th, m, g, r, index, mean, kept, h, stat)
        return
    optional = (_NONE if x is None else array(x) for x in (th, kept, stat))
    th_array, kept_array, stat_array = optional
    run(
        backend(_PACKAGE, "cpu").sweep, _blocks(n), n, th_array, array(m), array(g),
        DTYPE_CODES[g.dtype], array(r), array(index), array(mean), kept_array, stat_array, _BLOCK,
        _constants(h),
    )  # fmt: skip


def largest(statistic: Tensor, k: int) -> Tensor:
    """Return the positions int64 [k], ascending, of the k largest of fp32 |statistic| [N].

    Ties go to the lowest index. NaN counts as largest.

    Raises:
        ConfigError: k outside 0..N.
    """
    n = statistic.numel()
    if not 0 <= k <= n:
        raise ConfigError(f"k must be from 0 to {n}, got {k}")
    x = _flat("statistic", statistic, n)
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    if x.device.type == "cuda":
        return _largest_by_threshold(x, k)
    index = _candidates(x.view(torch.int32).numpy(), array(x), k)
    keys = x.view(torch.int32).numpy()[index] & _MAGNITUDE
    threshold = np.partition(keys, len(keys) - k)[len(keys) - k]
    taken = keys > threshold
    taken[np.flatnonzero(keys == threshold)[: k - int(taken.sum())]] = True
    return torch.from_numpy(index[taken])


def _candidates(words: np.ndarray, values: np.ndarray, k: int) -> np.ndarray:
    """Return ascending positions that hold the k largest, and few more.

    A sample tells a floor that almost surely lies a little below the k-th largest; one pass
    collects what is above. A floor too high is lowered, and no result depends on the sample.
    """
    n = len(words)
    sample = words[:: max(1, n // _SAMPLE) | 1] & _MAGNITUDE
    expected = len(sample) * k / n
    rank = int(expected + 4 * expected**0.5) + 1
    while True:
        place = len(sample) - rank
        floor = np.int32(np.partition(sample, place)[place]) if place > 0 else np.int32(0)
        room = min(n, int(1.25 * n * rank / len(sample)) + 64)
        args = (backend(_PACKAGE, "cpu").candidates, _blocks(n), n, values, _BLOCK, floor)
        found = run(*args, room)
        most = max(count for _, count in found)
        if most > room:  # many ties at the floor
            found = run(*args, most)
        if sum(count for _, count in found) >= k:
            return np.concatenate([positions for positions, _ in found])
        rank *= 8


def _largest_by_threshold(x: Tensor, k: int) -> Tensor:
    """Select with torch's own top-k, which promises no order among equals: threshold only."""
    keys = x.view(torch.int32) & 0x7FFFFFFF
    threshold = keys.topk(k, sorted=False).values.amin()
    above, equal = keys > threshold, keys == threshold
    ties = k - above.sum()
    return (above | (equal & (equal.cumsum(0) <= ties))).nonzero().view(-1)
