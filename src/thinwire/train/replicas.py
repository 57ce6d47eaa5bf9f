"""The optimizer, and how replicas (dp_replicate) agree: dense averages, SCAPE, or a baseline.

An optimizer that exchanges its own messages takes the place of `ReplicaSync`; the loop sees the
same two calls (`armed`, `finish`) and one more system, "replicas".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.optim import Optimizer

from thinwire import scape
from thinwire.comm import Ledger
from thinwire.comm.ledger import all_reduce_sent
from thinwire.errors import CheckpointError
from thinwire.scape.baselines import SyncRule
from thinwire.schedules import Density
from thinwire.train.config import Config, Replicas
from thinwire.train.gradients import ReplicaSync
from thinwire.train.mesh import Layout
from thinwire.train.optim import make_optimizer

__all__ = ["OwnSync", "ReplicaPart", "ReplicaSystem", "Sync", "inner_group", "make_replicas"]

_BASELINES = ("dgc", "demo", "powersgd")
# Torch's hook sends dense gradients until then (2 at least, with its error feedback).
_POWERSGD_START = 2
_ONE_BUCKET_MB = 1 << 20


class OwnSync:
    """Stand-in for `ReplicaSync` where the optimizer exchanges messages itself."""

    def __init__(self, arm: Callable[[bool], None] | None = None) -> None:
        self._arm, self._armed = arm, False

    @property
    def armed(self) -> bool:
        """Return whether the running backward completes the gradients."""
        return self._armed

    @armed.setter
    def armed(self, value: bool) -> None:
        self._armed = value
        if self._arm is not None:
            self._arm(value)

    def finish(self) -> None:
        """Leave the gradients as they are, this replica's own."""
        self._armed = False


Sync = ReplicaSync | OwnSync


class ReplicaSystem:
    """Metrics and per-rank state of an optimizer that has them, for the loop and checkpoints."""

    def __init__(self, optimizer: Any, layout: Layout) -> None:
        self.optimizer, self.layout = optimizer, layout
        self._ranks: list[int] = [dist.get_rank()]

    def metrics(self) -> dict[str, float]:
        """Return the optimizer's figures."""
        return self.optimizer.metrics()

    def expect(self, mesh: Mapping[str, int]) -> None:
        """Prepare to load a checkpoint of another mesh: all its replicas' parts are needed.

        Raises:
            CheckpointError: shards or stages changed too, which a part cannot follow.
        """
        sizes = self.layout.sizes
        if dict(mesh) == sizes:
            return
        if any(mesh[axis] != 1 or sizes[axis] != 1 for axis in ("pp", "dp_shard", "tp")):
            raise CheckpointError(
                "residuals follow a change of mesh.dp_replicate alone, with all other axes 1: "
                f"saved on {dict(mesh)}, now {sizes}"
            )
        self._ranks = list(range(mesh["dp_replicate"]))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part, or one like it for each rank to be loaded."""
        part = self.optimizer.local_state()
        return {"parts": {f"rank{rank}": _copy(part) for rank in self._ranks}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the parts, dealing residuals anew if the number of replicas changed."""
        self.optimizer.load_local_state(list(state["parts"].values()))
        self._ranks = [dist.get_rank()]


@dataclass(frozen=True)
class ReplicaPart:
    """What `make_replicas` sets up.

    Attributes:
        optimizer: over this rank's parameters.
        sync: what runs between backward and the optimizer.
        system: joins the loop's systems, None if there is nothing to report.
        forward: module to call in training.
        clips: the optimizer scales gradients itself.
    """

    optimizer: Optimizer
    sync: Sync
    system: ReplicaSystem | None
    forward: nn.Module
    clips: bool = False


def make_replicas(config: Config, layout: Layout, model: nn.Module, ledger: Ledger) -> ReplicaPart:
    """Return optimizer and synchronization; collective."""
    cfg, optim = config.systems.replicas, config.optim
    if cfg.optimizer in ("adamw", "adams"):
        optimizer: Optimizer = make_optimizer(config, model, ledger)
        if cfg.optimizer == "adams":
            optimizer = scape.AdamS(model.parameters(), **_hyper(config))
        apart = config.systems.outer.method != "none"
        sync = OwnSync() if apart else ReplicaSync(list(model.parameters()), layout, ledger)
        return ReplicaPart(optimizer, sync, None, model)
    if cfg.optimizer == "powersgd-ddp":
        return _ddp(config, layout, model, ledger)
    if cfg.optimizer in _BASELINES:
        baseline = scape.SyncOptimizer(
            model.named_parameters(),
            _baseline(cfg, config),
            optim.lr,
            optim.weight_decay,
            group=layout.group("dp_replicate"),
            ledger=ledger,
        )
        clips = cfg.optimizer == "dgc"
        return ReplicaPart(baseline, OwnSync(), ReplicaSystem(baseline, layout), model, clips)
    return _sparse(config, layout, model, ledger)


def _hyper(config: Config) -> dict[str, Any]:
    o = config.optim
    return {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay}


def _sparse(config: Config, layout: Layout, model: nn.Module, ledger: Ledger) -> ReplicaPart:
    cfg, optim = config.systems.replicas, config.optim
    own_clip = cfg.clip != "rms" and optim.max_norm > 0
    common: dict[str, Any] = {
        "density": Density(cfg.density, cfg.dense_steps, cfg.ramp_steps),
        "values_dtype": getattr(torch, cfg.values_dtype),
        "clip": cfg.clip if own_clip else None,
        "max_norm": optim.max_norm if own_clip else None,
        "group": layout.group("dp_replicate"),
        "shard_group": inner_group(layout),
        "ledger": ledger,
    }
    optimizer: scape.Scape | scape.TopkAdamW
    if cfg.optimizer == "topk-adamw":
        optimizer = scape.TopkAdamW(model.named_parameters(), **_hyper(config), **common)
    else:
        optimizer = scape.Scape(
            model.named_parameters(),
            **_hyper(config),
            **common,
            unmasked=cfg.unmasked,
            lag=cfg.lag,
            mask_source=cfg.mask_source,
            frozen_mask=cfg.frozen_mask,
            move_all=cfg.move_all,
            mask_format=cfg.mask_format,
            overlap=cfg.overlap,
            offload=None if cfg.offload == "none" else cfg.offload,
            mode="sharded" if cfg.sharded else "replicated",
            run_key=config.seed,
        )
    early = optimizer.overlap

    def arm(value: bool) -> None:
        if early is not None:
            early.enabled = value

    return ReplicaPart(
        optimizer, OwnSync(arm), ReplicaSystem(optimizer, layout), model, clips=own_clip
    )


def inner_group(layout: Layout) -> dist.ProcessGroup | None:
    """Return the ranks that hold one stage of one replica together; every rank calls it."""
    sizes = layout.sizes
    if sizes["tp"] == 1:
        return layout.group("dp_shard") if sizes["dp_shard"] > 1 else None
    if sizes["dp_shard"] == 1:
        return layout.group("tp")
    inner = layout.mesh["dp_shard", "tp"].mesh.flatten().tolist()
    groups: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(groups, inner)
    made = {tuple(ranks): dist.new_group(ranks) for ranks in sorted({tuple(g) for g in groups})}
    return made[tuple(inner)]


def _baseline(cfg: Replicas, config: Config) -> SyncRule:
    if cfg.optimizer == "dgc":
        return scape.Dgc(
            cfg.density, ramp_steps=cfg.ramp_steps // 4, max_norm=config.optim.max_norm
        )
    if cfg.optimizer == "demo":
        return scape.Demo()
    return scape.PowerSgd(cfg.rank, config.optim.betas, config.optim.eps)


def _ddp(config: Config, layout: Layout, model: nn.Module, ledger: Ledger) -> ReplicaPart:
    """Wrap the model in DDP with torch's PowerSGD hook, AdamW behind it."""
    from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415  only this arm pays
        powerSGD_hook as powersgd,
    )

    cfg = config.systems.replicas
    group = layout.group("dp_replicate")
    # One bucket: with more, the hook's chained all-reduces may start in another order on another
    # rank, and gloo, which matches messages by order, aborts the process.
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=_ONE_BUCKET_MB
    )
    state = powersgd.PowerSGDState(
        group, matrix_approximation_rank=cfg.rank, start_powerSGD_iter=_POWERSGD_START
    )

    def hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
        _book_powersgd(state, bucket, ledger, group.size())
        return powersgd.powerSGD_hook(state, bucket)

    wrapped.register_comm_hook(state, hook)
    ledger.expect("gradients", num_ranks=group.size())

    def arm(value: bool) -> None:
        wrapped.require_backward_grad_sync = value

    optimizer = make_optimizer(config, model, ledger)
    return ReplicaPart(optimizer, OwnSync(arm), None, wrapped)


def _book_powersgd(state: Any, bucket: Any, ledger: Ledger, num_ranks: int) -> None:
    dense = sent = 0
    for g in bucket.gradients():
        rows = g.shape[0] if g.ndim else 1
        columns = g.numel() // max(1, rows)
        low_rank = state.matrix_approximation_rank * (rows + columns)
        shrinks = g.ndim > 1 and low_rank * state.min_compression_rate < g.numel()
        dense += 4 * g.numel()
        sent += 4 * (low_rank if shrinks and state.iter >= state.start_powerSGD_iter else g.numel())
    ledger.book(
        "gradients",
        dense_bytes=all_reduce_sent(dense, num_ranks),
        wire_bytes=all_reduce_sent(sent, num_ranks),
    )


def _copy(part: Any) -> Any:
    if isinstance(part, dict):
        return {k: _copy(v) for k, v in part.items()}
    return part.clone() if isinstance(part, torch.Tensor) else part
