"""The four axes of ranks, and the model laid out over them.

Axes, outermost first: `pp` stages, `dp_replicate` replicas, `dp_shard` FSDP2 shards, `tp` splits.
Steps, each a no-op where its axis has one rank:
1. Build this rank's pipeline stage with its initial weights.
2. Split the blocks' matrices over `tp`.
3. Start from a dense file if asked; store the blocks' matrices quantized if asked.
4. Compile the blocks, then shard them and the rest with FSDP2 over `dp_shard`.
Gradients over `dp_replicate` are averaged by `gradients.ReplicaSync`, not by FSDP2's own hybrid
mode, whose all-reduce takes no codec.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from thinwire.comm import Ledger
from thinwire.pipeline import find_writes
from thinwire.replicas import Layout as ReplicasLayout
from thinwire.replicas import Site
from thinwire.train.axes import AXES, check_ranks, parse_replicas
from thinwire.train.config import Config
from thinwire.train.dense import load_dense
from thinwire.train.model import Transformer, build
from thinwire.train.optim import store_weights
from thinwire.train.tensor import split_blocks

__all__ = ["Layout", "MixedLayout", "make_layout", "needs_fsdp", "parallel_model"]


@dataclass(frozen=True)
class Layout:
    """Where this rank stands.

    Attributes:
        mesh: device mesh with the axes of `AXES`, all present.
        sizes: ranks per axis.
        device: where this rank computes.
    """

    mesh: DeviceMesh
    sizes: dict[str, int]
    device: torch.device

    def index(self, axis: str) -> int:
        """Return this rank's place on an axis."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one on `axis` alone."""
        return self.mesh.get_group(axis)

    @property
    def data_ranks(self) -> int:
        """Return how many parts a global batch is cut into."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def data_rank(self) -> int:
        """Return which part of the global batch this rank reads."""
        return self.index("dp_replicate") * self.sizes["dp_shard"] + self.index("dp_shard")

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank computes the loss."""
        return self.index("pp") == self.sizes["pp"] - 1


def make_layout(config: Config, device: torch.device) -> Layout:
    """Lay the world's ranks out; every rank calls it.

    Raises:
        ConfigError: axes, model and batch don't fit each other or the ranks.
    """
    sizes = check_ranks(config, dist.get_world_size())
    if config.mesh.replicas:
        return _mixed_layout(config, device)
    mesh = init_device_mesh(device.type, tuple(sizes[a] for a in AXES), mesh_dim_names=AXES)
    return Layout(mesh, sizes, device)


@dataclass(frozen=True)
class MixedLayout(Layout):
    """Where this rank stands among unlike replicas.

    Attributes:
        site: its replica, stage and groups; `sizes` are those of its replica, with all replicas on
            `dp_replicate`.
    """

    site: Site

    def index(self, axis: str) -> int:
        """Return this rank's place on an axis."""
        return {"pp": self.site.stage, "dp_replicate": self.site.index}.get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the stages of this replica for "pp"; no other axis is cut."""
        if axis == "pp" and self.site.inner is not None:
            return self.site.inner
        return self.mesh.get_group("pp")


def _mixed_layout(config: Config, device: torch.device) -> MixedLayout:
    cfg = config.systems.pipeline
    settings = {"mode": cfg.mode} if cfg.mode != "none" else {}
    replicas = ReplicasLayout.of(
        parse_replicas(config.mesh.replicas),
        constrain_full=cfg.constrain_full,
        anchor=cfg.anchor,
        **settings,
    )
    site = Site(replicas, device=device)
    sizes = {
        "pp": site.replica.num_stages,
        "dp_replicate": len(replicas.replicas),
        "dp_shard": 1,
        "tp": 1,
    }
    # Stands for axes that nothing is cut over: one group per rank.
    world = (1, dist.get_world_size(), 1, 1)
    mesh = init_device_mesh(device.type, world, mesh_dim_names=AXES)
    return MixedLayout(mesh, sizes, device, site)


def parallel_model(config: Config, layout: Layout, ledger: Ledger) -> Transformer:
    """Return this rank's part of the model, laid out over tp and dp_shard (see the module)."""
    compute = config.compute
    model = build(
        config.model,
        config.data.seq_len_tokens,
        config.seed,
        stage=layout.index("pp"),
        num_stages=layout.sizes["pp"],
        recompute=compute.activation_checkpointing,
    ).to(layout.device)
    split_blocks(config, layout.mesh, model, ledger)
    if config.init:
        load_dense(model, config)
    if config.systems.storage.fmt != "dense":
        store_weights(config.systems.storage, model)
    if compute.compile:
        for block in model.layers.values():
            block.compile()
    if needs_fsdp(config, layout):
        _shard(model, config, layout)
    return model


def needs_fsdp(config: Config, layout: Layout) -> bool:
    """Return whether FSDP2 wraps the model: to shard it, or for its mixed precision."""
    return layout.sizes["dp_shard"] > 1 or config.compute.dtype != "float32"


def _shard(model: Transformer, config: Config, layout: Layout) -> None:
    compute = config.compute
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute.dtype == "float32" else torch.bfloat16,
        reduce_dtype=getattr(torch, compute.reduce_dtype),
    )
    reshard = compute.reshard_after_forward
    writes = _constrained(model, config)

    def placement(p: nn.Parameter) -> Shard | None:
        # Columns of an output matrix are projected one by one: each rank takes whole ones.
        return Shard(p.ndim - 1) if id(p) in writes else None

    modules: list[nn.Module] = [*model.layers.values(), model]
    for module in modules:
        fully_shard(
            module,
            mesh=layout.mesh["dp_shard"],
            mp_policy=policy,
            reshard_after_forward=reshard if reshard > 0 else reshard == -1,
            shard_placement_fn=placement if writes else None,
        )


def _constrained(model: Transformer, config: Config) -> set[int]:
    """Return the identities of the output matrices that are kept in a subspace."""
    if config.systems.pipeline.mode != "constrained" or model.is_last:
        return set()
    return {id(p) for p in find_writes(model, config.model.dim).values()}
