"""AdamW and its learning rate, from the configuration."""

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from thinwire.schedules import Constant, Schedule, WarmupCosine
from thinwire.train.config import Config, Optim

__all__ = ["adamw", "lr_schedule"]


def adamw(cfg: Optim, model: nn.Module) -> AdamW:
    """Return AdamW with decay on matrices only.

    Parameters are also grouped by the mesh they lie on: torch's foreach kernels take no mixture.
    """
    groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
    for p in model.parameters():
        where = str(p.device_mesh) if isinstance(p, DTensor) else "plain"
        groups.setdefault((p.ndim > 1, where), []).append(p)
    return AdamW(
        [
            {"params": params, "weight_decay": cfg.weight_decay if decays else 0.0}
            for (decays, _), params in groups.items()
        ],
        lr=cfg.lr,
        betas=cfg.betas,
        eps=cfg.eps,
        foreach=True,
    )


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
