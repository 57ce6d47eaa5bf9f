"""AdamS: Adam whose second moment comes from the first, so that it keeps one state, not two.

Legend: `m` exp_avg before the step, `g` gradient.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.kernels import adams as kernels
from thinwire.scape.layout import local
from thinwire.scape.optimizer import check_hyper
from thinwire.scape.rules import step_bound

__all__ = ["AdamS"]


class AdamS(Optimizer):
    """Decoupled-decay AdamS.

        v = b2*m^2 + (1-b2)*g^2;  m = b1*m + (1-b1)*g;  w = (1 - lr*wd)*w - lr*m/(sqrt(v) + eps)

    with the old m in v, no bias correction. |step| <= 1.026*lr for any gradient at the default
    betas. Weight decay acts on parameters with two or more dimensions. Parameters without a
    gradient are left as they are, as torch's optimizers do.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, as for AdamW.
        betas: decay of the first moment, and weight of the old one in the second.
        eps: added to the root of the second moment; positive.
        weight_decay: decoupled decay.
        foreach: update all tensors in few calls (default), or one by one.
        fused: one pass per tensor in a kernel; None where it applies: float32 on the CPU.

    Raises:
        ConfigError: hyper-parameters out of range.

    Example:
        >>> optimizer = AdamS(model.parameters(), lr=3e-4)

    Reference: Huishuai Zhang et al., AdamS, arXiv 2505.16363.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        foreach: bool = True,
        fused: bool | None = None,
    ) -> None:
        check_hyper(lr, betas, eps, weight_decay)
        bound = step_bound(*betas)
        if bound > 2:
            warnings.warn(f"betas {betas} let a step reach {bound:.2f} * lr", stacklevel=2)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"foreach": foreach, "fused": fused})
        for group in self.param_groups:
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ConfigError(f"AdamS updates floating parameters, got {p.dtype}")
                self.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; return what the closure returned, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                self.state[p]["step"] += 1
            weights = [local(p.detach()) for p in params]
            grads = [local(p.grad) for p in params]
            moments = [local(self.state[p]["exp_avg"]) for p in params]
            if params:
                _pick(group, weights, moments)(weights, grads, moments, group)
        return loss


Update = Callable[[list[Tensor], list[Tensor], list[Tensor], dict[str, Any]], None]


def _pick(group: dict[str, Any], weights: list[Tensor], moments: list[Tensor]) -> Update:
    fits = all(
        x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu"
        for x in (*weights, *moments)
    )
    if group["fused"] and not fits:
        raise ConfigError("fused AdamS updates contiguous float32 tensors on the CPU: drop fused")
    if fits and group["fused"] is not False:
        return _fused_adams
    return _foreach_adams if group["foreach"] else _single_adams


def _fused_adams(
    weights: list[Tensor], grads: list[Tensor], moments: list[Tensor], group: dict[str, Any]
) -> None:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    for w, g, m in zip(weights, grads, moments, strict=True):
        decay = group["weight_decay"] if w.ndim > 1 else 0.0
        kernels.adams_(w, m, g, kernels.Step(lr, beta1, beta2, group["eps"], decay))


def _single_adams(
    weights: list[Tensor], grads: list[Tensor], moments: list[Tensor], group: dict[str, Any]
) -> None:
    lr, (beta1, beta2), eps = float(group["lr"]), group["betas"], group["eps"]
    for w, g, m in zip(weights, grads, moments, strict=True):
        g = g.to(w.dtype)
        v = m.square() * beta2 + g.square() * (1 - beta2)
        m.mul_(beta1).add_(g * (1 - beta1))
        if w.ndim > 1:
            w.mul_(1 - lr * group["weight_decay"])
        w.sub_(m * lr / v.sqrt_().add_(eps))


def _foreach_adams(
    weights: list[Tensor], grads: list[Tensor], moments: list[Tensor], group: dict[str, Any]
) -> None:
    lr, (beta1, beta2), eps = float(group["lr"]), group["betas"], group["eps"]
    grads = [g.to(w.dtype) for g, w in zip(grads, weights, strict=True)]
    v = torch._foreach_mul(moments, moments)
    torch._foreach_mul_(v, beta2)
    squares = torch._foreach_mul(grads, grads)
    torch._foreach_mul_(squares, 1 - beta2)
    torch._foreach_add_(v, squares)
    torch._foreach_mul_(moments, beta1)
    torch._foreach_add_(moments, torch._foreach_mul(grads, 1 - beta1))
    torch._foreach_sqrt_(v)
    torch._foreach_add_(v, eps)
    moves = torch._foreach_mul(moments, lr)
    torch._foreach_div_(moves, v)
    matrices = [w for w in weights if w.ndim > 1]
    if matrices:
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
    torch._foreach_sub_(weights, moves)
