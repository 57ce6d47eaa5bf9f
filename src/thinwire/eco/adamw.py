"""AdamW for quantized weights without a master copy."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from thinwire.comm import Ledger
from thinwire.eco.optimizer import EcoOptimizer
from thinwire.eco.state import StateForm
from thinwire.errors import ConfigError
from thinwire.kernels.eco import Step

__all__ = ["EcoAdamW"]


class EcoAdamW(EcoOptimizer):
    """AdamW whose rounding errors go into the first moment.

    Per quantized tensor, in fp32, with w^ the stored weights, q the rounding, c = 1 - beta^step:

        m~ = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   den = sqrt(v / c2) + eps
        w~ = (1 - lr wd) w^ - lr (m~ / c1) / den
        w^' = q(w~);   e = w~ - w^';   m' = m~ + (c1 / lr) (1 - 1 / b1) den e

    Weights that aren't quantized get torch's AdamW. State is named as torch names it. Parameters
    without a gradient are left alone; at lr 0 the moments alone take the gradient.

    Args:
        params: parameters or groups, some of them quantized by `quantize_`.
        lr: learning rate.
        betas: decay of the moments; the first must not be 0.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay (of plain weights with two or more dimensions too; give norms
            and biases a group with 0).
        state_dtype: moments of quantized weights: "fp32", "bf16" or "8bit".
        rounding: "sr" (stochastic) or "rtn" (to nearest).
        eco: False drops the error (a rival arm).
        kahan: keep the error in a bf16 buffer instead (a rival arm; implies eco=False).
        inject_lr: "current", or "next" to divide the error by the next step's rate, which the
            caller puts into `group["next_lr"]`: bounds what a jump of the rate amplifies.
        decay_factor: multiply the injection by 1 - lr * weight_decay.
        run_key: 64-bit key of the random numbers, in the checkpoint.
        nonfinite: NaN or infinity in a gradient: "skip" the step on all ranks, or "raise".
        group: ranks that agree on it; default all.
        ledger: books the scalars that ranks exchange.
        fused_backward: step each weight as soon as backward has its gradient, and free that; then
            `step()` only ends the step. Leaves no place for clipping by the global norm.

    Raises:
        ConfigError: options out of range, or nothing is quantized.

    Reference: Nikdan et al., "ECO: Quantized Training without Full-Precision Master Weights",
    arXiv 2601.22101.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-9,
        weight_decay: float = 0.1,
        *,
        state_dtype: str = "fp32",
        rounding: str = "sr",
        eco: bool = True,
        kahan: bool = False,
        inject_lr: str = "current",
        decay_factor: bool = False,
        run_key: int = 0,
        nonfinite: str = "skip",
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
        fused_backward: bool = False,
    ) -> None:
        if lr < 0 or eps <= 0 or weight_decay < 0:
            raise ConfigError(
                f"lr and weight_decay must be >= 0 and eps > 0: {lr=} {weight_decay=} {eps=}"
            )
        if not 0 <= betas[0] < 1 or not 0 <= betas[1] < 1:
            raise ConfigError(f"betas must lie in [0, 1), got {betas}")
        if betas[0] == 0 and eco and not kahan:
            raise ConfigError("betas[0] is 0: without a first moment the error has no place to go")
        super().__init__(
            params,
            {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay},
            forms=(
                StateForm(state_dtype, "exp_avg"),
                StateForm(state_dtype, "exp_avg_sq", is_square=True),
            ),
            eco=eco and not kahan,
            kahan=kahan,
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
        b1, b2 = group["betas"]
        c1 = 1 - b1**step
        return Step(
            lr=float(group["lr"]),
            b1=b1,
            b2=b2,
            eps=group["eps"],
            c1=c1,
            c2=1 - b2**step,
            weight_decay=group["weight_decay"],
            inject=self.injection(group, b1, c1),
        )

    def plain_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """See `EcoOptimizer`."""
        with torch.no_grad():
            zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32)} | zeros

    def plain_step(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        """See `EcoOptimizer`."""
        # By mesh: torch's foreach kernels take no mixture of layouts.
        by_layout: dict[str, list[nn.Parameter]] = {}
        for p in params:
            by_layout.setdefault(f"{getattr(p, 'device_mesh', '')}{p.dtype}", []).append(p)
        for same in by_layout.values():
            states = [self.state[p] for p in same]
            adamw(
                list(same),
                [p.grad for p in same if p.grad is not None],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [s["step"] for s in states],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
