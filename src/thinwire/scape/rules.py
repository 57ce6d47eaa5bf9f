"""The arithmetic of one step on one flat run of elements: what leaves, and what comes of the mean.

Plain torch, one operation per rounding (no fused multiply-add, which `add(alpha=)` may use), so
that kernels can agree bit for bit. All of it runs in the dtype of the state, float32 or float64.

Legend: `N` elements of a run, `E` of them sent, `m` exp_avg, `r` residual, `x` what this worker
sends, `q` what the wire makes of it, `p` the mean over workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.kernels.rounding import sqrt

__all__ = ["Adams", "Hyper", "Rule", "TopkAdamw", "step_bound"]

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Hyper:
    """One parameter group's numbers in one step (counted from 1)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """What one run of elements commits.

    Attributes:
        index: ascending positions sent, int64 [E]; None for all.
        x: what this worker sent [E], before the cast to the wire.
        q: the same after the cast.
        p: the mean over workers [E].
        clip: factor on the reconstructed gradient.
    """

    index: Tensor | None
    x: Tensor
    q: Tensor
    p: Tensor
    clip: float = 1.0


class Rule(Protocol):
    """An optimizer over a sparse mean.

    `shared` names the state that is equal on all workers; "residual" is each worker's own.
    """

    @property
    def shared(self) -> tuple[str, ...]:
        """Return the names of the state that all workers hold alike."""

    def outgoing(self, h: Hyper, state: State, g: Tensor) -> Tensor:
        """Return x for elements whose state and gradient are given, [E] each."""

    def gradient(self, h: Hyper, state: State, p: Tensor) -> Tensor:
        """Return the mean gradient that p stands for, [E]."""

    def commit(
        self, h: Hyper, state: State, g: Tensor, got: Arrived, own: Sequence[slice]
    ) -> tuple[Tensor, list[Tensor]]:
        """Update the state [N] in place.

        Returns:
            What to subtract from the weights [N], and the statistic of the next mask per slice.
        """


def step_bound(beta1: float, beta2: float) -> float:
    """Return the largest |step|/lr of AdamS for any gradient (Cauchy-Schwarz)."""
    return float((beta1**2 / beta2 + (1 - beta1) ** 2 / (1 - beta2)) ** 0.5)


@dataclass(frozen=True)
class Adams:
    """SCAPE's rule: AdamS on the sent first moment, the rest kept back.

    On the mask: g^ = (p - b1*m)/(1-b1), v = b2*m^2 + (1-b2)*g^^2, m' = p, r' = x - q.
    Off it: transfer m' = 0, r' = b1*m + (1-b1)*g + r; decay m' = b1*m, r' = (1-b1)*g + r.

    Attributes:
        unmasked: "transfer" or "decay".
        frozen: leave the residual out of the mask's statistic (a baseline: the mask freezes).
        move_all: step the elements off the mask too (a baseline, with decay).
    """

    unmasked: str = "transfer"
    frozen: bool = False
    move_all: bool = False

    @property
    def shared(self) -> tuple[str, ...]:
        """See `Rule`."""
        return ("exp_avg",)

    def outgoing(self, h: Hyper, state: State, g: Tensor) -> Tensor:
        """Return b1*m + (1-b1)*g + r."""
        x = state["exp_avg"] * h.beta1
        x += g * (1 - h.beta1)
        x += state["residual"]
        return x

    def gradient(self, h: Hyper, state: State, p: Tensor) -> Tensor:
        """Return (p - b1*m)/(1-b1)."""
        # Dividing by a Python number may multiply by its reciprocal; a tensor divides.
        return (p - state["exp_avg"] * h.beta1) / p.new_tensor(1 - h.beta1)

    def commit(
        self, h: Hyper, state: State, g: Tensor, got: Arrived, own: Sequence[slice]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Rule`."""
        m, r, index = state["exp_avg"], state["residual"], got.index
        old = m if index is None else m[index]
        grad = self.gradient(h, {"exp_avg": old}, got.p)
        new = got.p
        if got.clip != 1.0:
            grad = grad * got.clip
            new = old * h.beta1 + grad * (1 - h.beta1)
        v = old.square() * h.beta2 + grad.square() * (1 - h.beta2)
        move = new * h.lr / (sqrt(v).add_(h.eps))
        kept_back = got.x - got.q
        if index is None:
            m.copy_(new)
            r.copy_(kept_back)
            return move, self._statistics(h, m, r, own)
        if self.unmasked == "transfer":
            r.copy_(self.outgoing(h, state, g))
            m.zero_()
            delta = torch.zeros_like(m)
        else:
            r.copy_(g * (1 - h.beta1) + r)
            delta = self._walk(h, m) if self.move_all else torch.zeros_like(m)
            m *= h.beta1
        m[index] = new
        r[index] = kept_back.to(r.dtype)
        delta[index] = move
        return delta, self._statistics(h, m, r, own)

    def _walk(self, h: Hyper, m: Tensor) -> Tensor:
        return m * h.beta1 * h.lr / sqrt(m.square() * h.beta2).add_(h.eps)

    def _statistics(self, h: Hyper, m: Tensor, r: Tensor, own: Sequence[slice]) -> list[Tensor]:
        if self.frozen:
            return [(m[s] * h.beta1).abs_() for s in own]
        return [(m[s] * h.beta1 + r[s]).abs_() for s in own]


@dataclass(frozen=True)
class TopkAdamw:
    """Baseline: error-fed-back top-k of the gradient, AdamW on the sparse mean.

    x = g + r; r' = x off the mask; moments and weights are updated densely with the mean, 0 off it.
    """

    @property
    def shared(self) -> tuple[str, ...]:
        """See `Rule`."""
        return ("exp_avg", "exp_avg_sq")

    def outgoing(self, h: Hyper, state: State, g: Tensor) -> Tensor:
        """Return g + r."""
        return g + state["residual"]

    def gradient(self, h: Hyper, state: State, p: Tensor) -> Tensor:
        """Return p."""
        return p

    def commit(
        self, h: Hyper, state: State, g: Tensor, got: Arrived, own: Sequence[slice]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Rule`."""
        m, v, r, index = state["exp_avg"], state["exp_avg_sq"], state["residual"], got.index
        everything = self.outgoing(h, state, g)
        statistics = [everything[s].abs() for s in own]
        mean = got.p if got.clip == 1.0 else got.p * got.clip
        if index is None:
            r.copy_(got.x - got.q)
        else:
            r.copy_(everything)
            r[index] = (got.x - got.q).to(r.dtype)
            mean = torch.zeros_like(m).index_copy_(0, index, mean)
        m.mul_(h.beta1).add_(mean * (1 - h.beta1))
        v.mul_(h.beta2).add_(mean.square() * (1 - h.beta2))
        denominator = (v / (1 - h.beta2**h.step)).sqrt_().add_(h.eps)
        return m * (h.lr / (1 - h.beta1**h.step)) / denominator, statistics
