"""AdamS and SCAPE's update in plain torch: the specification of the fused sweep.

Legend: `N` elements, `K` positions in the mask, flat tensors; fp32 (fp64 as an oracle).

    on the mask:   g^ = clip*(p - b1*m)/(1-b1);  v = b2*m^2 + (1-b2)*g^^2;  m' = p;  r' = kept
                   (m' = b1*m + (1-b1)*g^ where clip is not 1)
    off the mask:  transfer  m' = 0,     r' = ((b1*m) + (1-b1)*g) + r
                   decay     m' = b1*m,  r' = (1-b1)*g + r
    weights:       th = (1 - lr*wd)*th everywhere; th = th - lr*m'/(sqrt(v) + eps) on the mask

Reference: Zheng et al., "SCAPE", arXiv 2607.01678; Zhang et al., "AdamS", arXiv 2505.16363. The
off-mask rules are thinwire's reconstruction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.rounding import sqrt

__all__ = ["Step", "adams", "gather", "largest", "sweep"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's constants. `transfer` picks the off-mask rule, `clip` scales g^."""

    lr: float
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    transfer: bool = True
    clip: float = 1.0

    @property
    def decay(self) -> float:
        """Return the factor of decoupled weight decay."""
        return 1.0 - self.lr * self.weight_decay


def _step_size(m: Tensor, v: Tensor, h: Step) -> Tensor:
    return (h.lr * m) / (sqrt(v) + h.eps)


def adams(theta: Tensor, m: Tensor, g: Tensor, h: Step) -> None:
    """Take a dense AdamS step in place: v from the old momentum, no bias correction."""
    g = g.to(m.dtype)
    v = h.b2 * (m * m) + (1 - h.b2) * (g * g)
    m.copy_(h.b1 * m + (1 - h.b1) * g)
    theta.copy_(h.decay * theta - _step_size(m, v, h))


def gather(m: Tensor, g: Tensor, r: Tensor, index: Tensor, b1: float) -> Tensor:
    """Return x = ((b1*m) + (1-b1)*g) + r at the positions `index` int64 [K]."""
    return ((b1 * m[index]) + (1 - b1) * g[index].to(m.dtype)) + r[index]


def sweep(
    theta: Tensor | None,
    m: Tensor,
    g: Tensor,
    r: Tensor,
    index: Tensor,
    mean: Tensor,
    kept: Tensor | None,
    h: Step,
    statistic: Tensor | None = None,
) -> None:
    """Apply one SCAPE step in place.

    Args:
        theta: weights [N], or None where another rank owns them.
        m: first moments [N].
        g: local gradient [N], any floating dtype.
        r: residual [N].
        index: mask positions int64 [K], ascending.
        mean: p [K], the mean of the sent values.
        kept: what rounding to the wire held back [K]; None: zero.
        h: constants.
        statistic: None, or where |b1*m' + r'| [N] goes.
    """
    g = g.to(m.dtype)
    old = m[index]
    gradient = (mean - h.b1 * old) / m.new_tensor(1 - h.b1)
    if h.clip != 1.0:
        gradient = h.clip * gradient
        mean = h.b1 * old + (1 - h.b1) * gradient
    v = h.b2 * (old * old) + (1 - h.b2) * (gradient * gradient)
    if h.transfer:
        r.copy_(((h.b1 * m) + (1 - h.b1) * g) + r)
        m.zero_()
    else:
        r.copy_((1 - h.b1) * g + r)
        m.mul_(h.b1)
    m[index] = mean
    r[index] = torch.zeros_like(mean) if kept is None else kept
    if theta is not None:
        theta.mul_(h.decay)
        theta[index] = theta[index] - _step_size(mean, v, h)
    if statistic is not None:
        statistic.copy_((h.b1 * m + r).abs())


def largest(statistic: Tensor, k: int) -> Tensor:
    """Return the positions int64 [K], ascending, of the k largest; ties go to the lowest index."""
    order = torch.sort(statistic, descending=True, stable=True).indices[:k]
    return order.sort().values
