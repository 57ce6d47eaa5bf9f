"""Stored weights, the optimizer and its learning rate, from the configuration."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from thinwire import eco
from thinwire.comm import Ledger
from thinwire.schedules import Constant, Schedule, WarmupCosine
from thinwire.train.config import Config, Optim, Storage

__all__ = ["adamw", "lr_schedule", "make_optimizer", "storage_format", "store_weights"]


def store_weights(cfg: Storage, model: nn.Module) -> None:
    """Turn the blocks' matrices (or the experts alone) into quantized parameters."""
    eco.quantize_(
        model,
        cfg.fmt,
        granularity=_granularity(cfg),
        filter=eco.experts if cfg.only_experts else None,
        pow2_scale=cfg.pow2_scale,
        master=cfg.error == "master",
        act_quant="fp8_e4m3" if cfg.act_quant else None,
    )


def storage_format(cfg: Storage) -> eco.Format:
    """Return how weights are stored."""
    return eco.Format.parse(cfg.fmt, _granularity(cfg), cfg.pow2_scale)


def _granularity(cfg: Storage) -> str | None:
    named = {"default": None, "group": f"group:{cfg.group_size}"}
    return named.get(cfg.granularity, cfg.granularity)


def make_optimizer(config: Config, model: nn.Module, ledger: Ledger) -> Optimizer:
    """Return AdamW, or EcoAdamW where weights are stored quantized."""
    cfg = config.systems.storage
    if cfg.fmt == "dense":
        return adamw(config.optim, model)
    return eco.EcoAdamW(
        _decay_groups(config.optim, model),
        lr=config.optim.lr,
        betas=config.optim.betas,
        eps=config.optim.eps,
        state_dtype=cfg.state,
        rounding=cfg.rounding,
        eco=cfg.error == "momentum",
        kahan=cfg.error == "kahan",
        inject_lr=cfg.inject_lr,
        decay_factor=cfg.decay_factor,
        run_key=config.seed,
        nonfinite="raise",
        ledger=ledger,
        fused_backward=cfg.fused_backward,
    )


def adamw(cfg: Optim, model: nn.Module) -> AdamW:
    """Return torch's AdamW with decay on matrices only."""
    return AdamW(_decay_groups(cfg, model), lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, foreach=True)


def _decay_groups(cfg: Optim, model: nn.Module) -> list[dict[str, Any]]:
    # Also by mesh: torch's foreach kernels take no mixture.
    groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
    for p in model.parameters():
        where = str(p.device_mesh) if isinstance(p, DTensor) else "plain"
        groups.setdefault((p.ndim > 1, where), []).append(p)
    return [
        {"params": params, "weight_decay": cfg.weight_decay if decays else 0.0}
        for (decays, _), params in groups.items()
    ]


def lr_schedule(config: Config) -> Schedule:
    """Return step -> learning rate."""
    cfg = config.optim
    if cfg.schedule == "constant":
        return Constant(peak=cfg.lr, warmup_steps=cfg.warmup_steps)
    return WarmupCosine(
        peak=cfg.lr,
        total_steps=config.steps,
        warmup_steps=cfg.warmup_steps,
        floor=cfg.lr_floor,
    )
