"""SGD with momentum for quantized weights without a master copy."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm import Ledger
from thinwire.eco.optimizer import EcoOptimizer
from thinwire.eco.placement import plain
from thinwire.eco.state import StateForm
from thinwire.errors import ConfigError
from thinwire.kernels.eco import Step

__all__ = ["EcoSGD", "exact_inject"]


def exact_inject(m: Tensor, previous: Tensor, error: Tensor, h: Step) -> Tensor:
    """Return m + (1 - lr wd) previous / lr + inject error: master weights' trajectory.

    `h.inject` is -(1 - lr' wd) / (beta lr') with the next step's rate lr'.
    """
    return m + (h.decay / h.lr) * previous + h.inject * error


class EcoSGD(EcoOptimizer):
    """SGD with an averaged momentum whose rounding errors go into that momentum.

        m~ = beta m + (1 - beta) g;   w~ = (1 - lr wd) w^ - lr m~
        w^' = q(w~);   e = w~ - w^';   m' = m~ + (1 / lr) (1 - 1 / beta) e

    With `exact=True` the momentum also gets the previous step's error back, which makes the stored
    weights those of a run with master weights that began at the same rounded ones; it costs an
    fp32 buffer and serves as an oracle. Under a schedule it needs `group["next_lr"]`.

    Args:
        params: parameters or groups, some of them quantized by `quantize_`.
        lr: learning rate.
        momentum: beta; must not be 0. The average, not the sum: lr is as for plain SGD.
        weight_decay: decoupled decay.
        exact: follow master weights exactly.
        state_dtype: momentum of quantized weights: "fp32", "bf16" or "8bit".
        rounding, eco, inject_lr, decay_factor, run_key, nonfinite, group, ledger, fused_backward:
            as in `EcoAdamW`.

    Raises:
        ConfigError: options out of range, or nothing is quantized.

    Reference: Nikdan et al., "ECO: Quantized Training without Full-Precision Master Weights",
    arXiv 2601.22101.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        exact: bool = False,
        state_dtype: str = "fp32",
        rounding: str = "sr",
        eco: bool = True,
        inject_lr: str = "current",
        decay_factor: bool = False,
        run_key: int = 0,
        nonfinite: str = "skip",
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
        fused_backward: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ConfigError(f"lr and weight_decay must be >= 0: {lr=} {weight_decay=}")
        if not 0 < momentum < 1:
            raise ConfigError(f"momentum must lie between 0 and 1, got {momentum}")
        if exact and (not eco or state_dtype != "fp32"):
            raise ConfigError('exact=True needs eco=True and state_dtype="fp32"')
        self.exact = exact
        forms = [StateForm(state_dtype, "momentum_buffer")]
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            forms=[*forms, StateForm("fp32", "error")] if exact else forms,
            eco=eco,
            kahan=False,
            rounding=rounding,
            inject_lr=inject_lr,
            decay_factor=decay_factor,
            run_key=run_key,
            nonfinite=nonfinite,
            group=group,
            ledger=ledger,
            fused_backward=fused_backward,
        )

    def numbers(self, group: dict[str, Any], step: int) -> Step:
        """See `EcoOptimizer`."""
        lr, beta = float(group["lr"]), group["momentum"]
        factor = self.injection(group, beta, 1.0)
        if self.exact and lr:
            next_lr = float(group["next_lr"] or lr)
            factor = -(1 - next_lr * group["weight_decay"]) / (beta * next_lr)
        return Step(lr=lr, b1=beta, weight_decay=group["weight_decay"], inject=factor, adam=False)

    def inject(
        self, m_RC: Tensor, error_RC: Tensor, den: Tensor | float, h: Step, slot: Any
    ) -> Tensor:
        """See `EcoOptimizer`."""
        if not self.exact:
            return super().inject(m_RC, error_RC, den, h, slot)
        previous = plain(self.state[slot.param]["error"]).view(error_RC.shape)
        m_RC = exact_inject(m_RC, previous, error_RC, h)
        previous.copy_(error_RC)
        return m_RC

    def plain_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """See `EcoOptimizer`."""
        with torch.no_grad():
            return {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(param)}

    def plain_step(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        """See `EcoOptimizer`."""
        lr, beta = float(group["lr"]), group["momentum"]
        for p in params:
            state = self.state[p]
            state["step"] += 1
            m, w = plain(state["momentum_buffer"]), plain(p)
            assert p.grad is not None
            m.lerp_(plain(p.grad).to(m.dtype), 1 - beta)
            w.mul_(1 - lr * group["weight_decay"]).add_(m, alpha=-lr)
