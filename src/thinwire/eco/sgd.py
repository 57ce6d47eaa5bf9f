"""SGD with momentum for quantized weights without a master copy."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm import Ledger
from thinwire.eco.optimizer import EcoOptimizer, Updated
from thinwire.eco.placement import plain
from thinwire.eco.state import StateForm
from thinwire.errors import ConfigError
from thinwire.kernels.eco import reference

__all__ = ["EcoSGD"]


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

    def update(
        self, w_RC: Tensor, g_RC: Tensor, state: dict[str, Any], slot: Any, group: dict[str, Any]
    ) -> Updated:
        """See `EcoOptimizer`."""
        lr = float(group["lr"])
        later = group["next_lr"] if self.exact else None
        numbers = reference.Sgd(
            lr=lr,
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            inject_lr=float(later or lr) or 1.0 if self.exact else self.injection_lr(group),
            decay_factor=self.decay_factor,
        )
        m = self.forms[0].read(state, slot.piece)
        target_RC, m = reference.sgd_target(w_RC, g_RC, m, numbers)

        def inject(error: Tensor) -> dict[str, Tensor]:
            if not self.exact:
                return {"momentum_buffer": reference.sgd_inject(m, error, numbers)}
            previous = self.forms[1].read(state, slot.piece)
            buffer = reference.sgd_exact_inject(m, previous, error, numbers)
            return {"momentum_buffer": buffer, "error": error}

        return Updated(target_RC, {"momentum_buffer": m}, inject)

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
