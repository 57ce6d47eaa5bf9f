"""AdamS and SCAPE's sweep on CUDA: equals `reference.py` bit for bit.

The sweep is one pass: a program looks every element of its block up among the block's few mask
positions (a binary search in the cache), so that nothing is read or written twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.adams.reference import Step
from thinwire.kernels.device import grid, launch, load_tile, pattern, store_tile, widen

__all__ = ["adams", "gather", "sweep"]

_BLOCK = 1024


@triton.jit
def _moved(theta, m, v, lr, eps):
    return theta - tl.div_rn(lr * m, tl.sqrt_rn(v) + eps)


@triton.jit(do_not_specialize=["n"])
def _adams(theta_ptr, m_ptr, g_ptr, n, lr, b1, a1, b2, a2, eps, decay,
           BLOCK: tl.constexpr):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    index, end = begin + tl.arange(0, BLOCK), begin + BLOCK
    g = load_tile(g_ptr, index, end, n)
    old = load_tile(m_ptr, index, end, n)
    theta = load_tile(theta_ptr, index, end, n)
    v = b2 * (old * old) + a2 * (g * g)
    m = b1 * old + a1 * g
    store_tile(m_ptr, index, end, n, m)
    store_tile(theta_ptr, index, end, n, _moved(decay * theta, m, v, lr, eps))


@triton.jit(do_not_specialize=["k"])
def _gather(m_ptr, g_ptr, r_ptr, index_ptr, out_ptr, k, b1, a1, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(index_ptr + j, mask=j < k, other=0)
    m = tl.load(m_ptr + i, mask=j < k, other=0.0)
    g = widen(tl.load(g_ptr + i, mask=j < k, other=0))
    r = tl.load(r_ptr + i, mask=j < k, other=0.0)
    tl.store(out_ptr + j, ((b1 * m) + a1 * g) + r, mask=j < k)


@triton.jit
def _find(index_ptr, i, low, high, BLOCK: tl.constexpr):
    """Return where positions i stand among index[low:high], ascending, and whether they do."""
    lower = tl.zeros([BLOCK], tl.int64) + low
    upper = tl.zeros([BLOCK], tl.int64) + high
    width = high - low
    while width > 0:
        middle = (lower + upper) >> 1
        inside = lower < upper
        below = tl.load(index_ptr + middle, mask=inside, other=0) < i
        lower = tl.where(inside & below, middle + 1, lower)
        upper = tl.where(inside & (below == 0), middle, upper)
        width = width >> 1
    found = lower < high
    return lower, found & (tl.load(index_ptr + lower, mask=found, other=-1) == i)


@triton.jit(do_not_specialize=["n"])
def _sweep(theta_ptr, m_ptr, g_ptr, r_ptr, index_ptr, mean_ptr, kept_ptr, bound_ptr, out_ptr, n,
           lr, b1, a1, b2, a2, eps, decay, clip, BLOCK: tl.constexpr, TRANSFER: tl.constexpr,
           CLIP: tl.constexpr, OWNED: tl.constexpr, KEPT: tl.constexpr,
           STATISTIC: tl.constexpr):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    i, end = begin + tl.arange(0, BLOCK), begin + BLOCK
    low, high = tl.load(bound_ptr + tl.program_id(0)), tl.load(bound_ptr + tl.program_id(0) + 1)
    place, sent = _find(index_ptr, i, low, high, BLOCK)
    g = load_tile(g_ptr, i, end, n)
    old = load_tile(m_ptr, i, end, n)
    r = load_tile(r_ptr, i, end, n)
    p = tl.load(mean_ptr + place, mask=sent, other=0.0)
    gradient = tl.div_rn(p - b1 * old, a1)
    if CLIP:
        gradient = clip * gradient
        p = b1 * old + a1 * gradient
    if TRANSFER:
        r = ((b1 * old) + a1 * g) + r
        m = tl.zeros_like(old)
    else:
        r = a1 * g + r
        m = b1 * old
    back = tl.zeros_like(old)
    if KEPT:
        back = tl.load(kept_ptr + place, mask=sent, other=0.0)
    m = tl.where(sent, p, m)
    r = tl.where(sent, back, r)
    store_tile(m_ptr, i, end, n, m)
    store_tile(r_ptr, i, end, n, r)
    if OWNED:
        theta = decay * load_tile(theta_ptr, i, end, n)
        v = b2 * (old * old) + a2 * (gradient * gradient)
        theta = tl.where(sent, _moved(theta, p, v, lr, eps), theta)
        store_tile(theta_ptr, i, end, n, theta)
    if STATISTIC:
        store_tile(out_ptr, i, end, n, tl.abs(b1 * m + r))


def _numbers(h: Step) -> tuple[float, ...]:
    return (h.lr, h.b1, 1 - h.b1, h.b2, 1 - h.b2, h.eps, h.decay)


def adams(theta: Tensor, exp_avg: Tensor, g: Tensor, h: Step) -> None:
    """Take a dense AdamS step in place on flat tensors [N]."""
    n = g.numel()
    launch(
        _adams, (grid(n, _BLOCK),), theta, exp_avg, pattern(g), n, *_numbers(h), BLOCK=_BLOCK
    )  # fmt: skip


def gather(m: Tensor, g: Tensor, r: Tensor, index: Tensor, b1: float, out: Tensor) -> None:
    """Write ((b1*m) + (1-b1)*g) + r at the positions `index` into out [K]."""
    k = index.numel()
    launch(
        _gather, (grid(k, _BLOCK),), m, pattern(g), r, index, out, k, b1, 1 - b1, BLOCK=_BLOCK
    )  # fmt: skip


def sweep(
    theta: Tensor | None,
    m: Tensor,
    g: Tensor,
    r: Tensor,
    index: Tensor,
    mean: Tensor,
    kept: Tensor | None,
    h: Step,
    statistic: Tensor | None,
) -> None:
    """Apply one SCAPE step in place on flat tensors [N] (see `reference.sweep`)."""
    n = g.numel()
    blocks = grid(n, _BLOCK)
    edges = torch.arange(blocks + 1, device=g.device) * _BLOCK
    bounds = torch.searchsorted(index, edges)
    launch(
        _sweep, (blocks,), theta, m, pattern(g), r, index, mean, kept, bounds, statistic, n,
        *_numbers(h), h.clip, BLOCK=_BLOCK, TRANSFER=h.transfer, CLIP=h.clip != 1.0,
        OWNED=theta is not None, KEPT=kept is not None, STATISTIC=statistic is not None,
    )  # fmt: skip
