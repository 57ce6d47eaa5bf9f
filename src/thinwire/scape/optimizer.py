"""`Scape`, and the baseline that sends top-k gradients over the same wire."""

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm import Ledger
from thinwire.errors import ConfigError
from thinwire.scape.engine import Options, SparseOptimizer
from thinwire.scape.rules import Adams, TopkAdamw, step_bound
from thinwire.scape.worker import Masking
from thinwire.schedules import Schedule

__all__ = ["Scape", "TopkAdamW", "check_hyper"]

UNMASKED = ("transfer", "decay")


class Scape(SparseOptimizer):
    """AdamS whose data-parallel workers exchange a sparse first moment instead of gradients.

    Give it a plain module's parameters (no DDP), or those of a module that FSDP2 or tensor
    parallelism splits inside a replica; each rank calls backward on its own data, then `step`.

    With m the first moment, r this worker's residual, g its gradient, M the mask of this step::

        on M:   p = mean over workers of (b1*m + (1-b1)*g + r)          # the only value message
                g^ = (p - b1*m)/(1-b1);  v = b2*m^2 + (1-b2)*g^^2;  m = p;  r = 0
                w = w - lr*m/(sqrt(v) + eps)
        off M:  transfer: m = 0, r = b1*m + (1-b1)*g + r;  decay: m = b1*m, r = (1-b1)*g + r

    The next mask is the top k of |b1*m + r| per tensor, built by the tensor's owner and sent,
    packed, under the next forward and backward. Weight decay is decoupled and acts on every element
    of parameters with two or more dimensions. |step| <= 1.026*lr whatever the residual holds. A
    parameter without gradient counts as zero gradient and still takes its idle step.

    Args:
        params: parameters or parameter groups; `named_parameters()` gives names to errors, masks
            and `dense=`.
        lr: learning rate (groups may override; schedulers may change it).
        density: fraction of elements sent, or a schedule over steps such as
            `schedules.Density(0.01, warmup_steps=500, ramp_steps=100)`; the first step sends all.
        betas: decay of the first moment, and weight of the old one in the second.
        eps: added to the root of the second moment; positive.
        weight_decay: decoupled decay.
        unmasked: what becomes of elements off the mask, "transfer" or "decay".
        lag: 1 hides the mask exchange under the next forward and backward; 0 picks the mask of the
            step itself and waits for it.
        clip: "local" (norm of this worker's gradient), "rms" (root mean square of the workers'
            norms) or "reconstructed" (norm of g^); "local" if only max_norm is given.
        max_norm: gradient norm above which gradients are scaled down.
        dense_below: parameters with fewer elements are sent in full, as are those with fewer than
            two dimensions.
        dense: names of parameters that are sent in full too.
        mode: "replicated", or "sharded": a tensor's float32 weights lie at its owner, who steps
            them and sends the result in the parameters' dtype.
        partition: masks per "tensor", or per run of "rows" of large tensors, which balances owners.
        values_dtype: torch.float32 or torch.bfloat16 on the wire.
        residual_dtype: bfloat16 halves the residual and loses small increments.
        mask_format: "bits", "index12", "auto" (per tensor the smaller) or "delta" (changes since
            the last mask; costs a host synchronization).
        reduce: "ordered" (sums in rank order) or "native" (torch's all-reduce).
        overlap: send a run's values while backward computes the others; wrap all but the last
            micro-step in `no_sync()`.
        offload: keep the "residual", or "all" state, in host memory.
        nonfinite: "raise" on all ranks, or "skip" the step on all ranks.
        group: the workers; None is the world.
        shard_group: ranks that hold one replica together, where that is not the one mesh axis of
            the parameters; norms and verdicts are summed over it.
        ledger: books every byte.
        check_every: steps between hash checks of weights, moments and masks; 0 for none.
        initial: "check" that workers start from equal weights, or "broadcast" rank 0's.
        run_bytes: elements are computed, and overlapped, in runs of about these bytes.
        mask_source: "owner"; baselines: "random" (shared key) or "union" of all workers' masks.
        run_key: 64-bit key of random masks.
        frozen_mask, move_all: baselines, see `rules.Adams`.

    Raises:
        ConfigError: settings that don't exist or exclude each other, or nothing to sparsify.
        ContractError: ranks were given other parameters or other weights.

    Example:
        >>> opt = Scape(model.named_parameters(), lr=3e-3, density=0.01, ledger=ledger)
        >>> loss(model(x)).backward(); opt.step(); opt.zero_grad()

    Reference: Zheng, Chen, Xie, Zhang, "SCAPE: Accurate and Efficient LLM Training with Extreme
        Sparse Communication", arXiv 2607.01678 (its update equations are not public: these are
        our reconstruction).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        density: float | Schedule = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        unmasked: str = "transfer",
        lag: int = 1,
        clip: str | None = None,
        max_norm: float | None = None,
        dense_below: int = 4096,
        dense: Collection[str] = (),
        mode: str = "replicated",
        partition: str = "tensor",
        values_dtype: torch.dtype = torch.float32,
        residual_dtype: torch.dtype = torch.float32,
        mask_format: str = "auto",
        reduce: str = "ordered",
        overlap: bool = False,
        offload: str | None = None,
        nonfinite: str = "raise",
        group: dist.ProcessGroup | None = None,
        shard_group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
        check_every: int = 100,
        initial: str = "check",
        run_bytes: int = 25 * 2**20,
        mask_source: str = "owner",
        run_key: int = 0,
        frozen_mask: bool = False,
        move_all: bool = False,
    ) -> None:
        check_hyper(lr, betas, eps, weight_decay)
        if unmasked not in UNMASKED:
            raise ConfigError(f"unmasked must be 'transfer' or 'decay', got {unmasked!r}")
        if move_all and unmasked != "decay":
            raise ConfigError("move_all steps momentum off the mask, which 'transfer' sets to 0")
        bound = step_bound(*betas)
        if bound > 2:
            warnings.warn(f"betas {betas} let a step reach {bound:.2f} * lr", stacklevel=2)
        if residual_dtype == torch.bfloat16:
            warnings.warn("a bfloat16 residual rounds small increments away", stacklevel=2)
        options = Options(
            density=density,
            lag=lag,
            clip=clip,
            max_norm=max_norm,
            dense_below=dense_below,
            dense=dense,
            mode=mode,
            partition=partition,
            values_dtype=values_dtype,
            residual_dtype=residual_dtype,
            masking=Masking(source=mask_source, mask_format=mask_format, run_key=run_key),
            reduce=reduce,
            overlap=overlap,
            offload=offload,
            nonfinite=nonfinite,
            check_every=check_every,
            initial=initial,
            run_bytes=run_bytes,
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        rule = Adams(unmasked, frozen_mask, move_all)
        super().__init__(
            params, defaults, rule, options, group=group, shard_group=shard_group, ledger=ledger
        )


class TopkAdamW(SparseOptimizer):
    """Baseline: error-fed-back top-k gradients over SCAPE's wire, AdamW on the sparse mean.

    Masks are the top k of |g + r|, built by owners one step early; moments and weights are updated
    everywhere with the mean, which is 0 off the mask.

    Args:
        params: as for `Scape`.
        lr: learning rate.
        density: as for `Scape`.
        betas: as for AdamW.
        eps: as for AdamW.
        weight_decay: decoupled decay, on parameters with two or more dimensions.
        clip: as for `Scape`.
        max_norm: as for `Scape`.
        dense_below: as for `Scape`.
        values_dtype: as for `Scape`.
        group: the workers; None is the world.
        shard_group: as for `Scape`.
        ledger: books every byte.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        density: float | Schedule = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        clip: str | None = None,
        max_norm: float | None = None,
        dense_below: int = 4096,
        values_dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        shard_group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        check_hyper(lr, betas, eps, weight_decay)
        options = Options(
            density=density,
            clip=clip,
            max_norm=max_norm,
            dense_below=dense_below,
            values_dtype=values_dtype,
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, TopkAdamw(), options,
            group=group, shard_group=shard_group, ledger=ledger,
        )  # fmt: skip


def check_hyper(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuse hyper-parameters that cannot work.

    Raises:
        ConfigError: names the parameter.
    """
    if lr < 0:
        raise ConfigError(f"lr must not be negative, got {lr}")
    if not all(0.0 <= b < 1.0 for b in betas) or betas[1] == 0.0:
        raise ConfigError(f"betas must lie in [0, 1), the second above 0, got {betas}")
    if eps <= 0:
        raise ConfigError(f"eps must be positive (idle elements divide by it), got {eps}")
    if weight_decay < 0:
        raise ConfigError(f"weight_decay must not be negative, got {weight_decay}")
