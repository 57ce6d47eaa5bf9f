"""The sizes of the mesh axes, checked against ranks, model and batch before anything starts."""

import math
from dataclasses import asdict

from thinwire.errors import ConfigError
from thinwire.train.config import Config, Mesh

__all__ = ["AXES", "check_layout", "resolve_axes"]

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def resolve_axes(mesh: Mesh, num_ranks: int) -> dict[str, int]:
    """Return ranks per axis with the -1 filled in.

    Raises:
        ConfigError: the axes' product isn't `num_ranks`.
    """
    sizes = asdict(mesh)
    text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if any(size != -1 and size < 1 for size in sizes.values()):
        raise ConfigError(f"mesh {text}: an axis must be at least 1, or -1 for the rest")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"mesh {text}: only one axis may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and num_ranks % fixed == 0:
        sizes[free[0]] = num_ranks // fixed
    if math.prod(sizes.values()) != num_ranks:
        need = f"a multiple of {fixed}" if free else f"{fixed}"
        raise ConfigError(f"mesh {text} needs {need} ranks, but {num_ranks} run: change --nproc")
    return sizes


def check_layout(config: Config, sizes: dict[str, int]) -> None:
    """Raise ConfigError for a model or batch that the axes cannot carry."""
    model, data, tp, pp = config.model, config.data, sizes["tp"], sizes["pp"]
    parts = sizes["dp_replicate"] * sizes["dp_shard"] * data.micro_batches
    if data.batch_seqs % parts:
        raise ConfigError(
            f"data.batch_seqs {data.batch_seqs} must be a multiple of data ranks x "
            f"data.micro_batches = {parts}"
        )
    if model.num_kv_heads % tp or model.hidden_dim % tp:
        raise ConfigError(
            f"tp {tp} must divide model.num_kv_heads {model.num_kv_heads} and "
            f"model.hidden_dim {model.hidden_dim}"
        )
    reshard, dp_shard = config.compute.reshard_after_forward, sizes["dp_shard"]
    if reshard < -1 or (reshard > 0 and dp_shard % reshard):
        raise ConfigError(
            f"compute.reshard_after_forward {reshard} must be -1, 0 or a divisor of "
            f"mesh.dp_shard {dp_shard}"
        )
    if tp > 1 and model.num_experts:
        raise ConfigError("experts cannot be split over tp: set mesh.tp 1 or model.num_experts 0")
    if pp > model.num_layers:
        raise ConfigError(f"pp {pp} has more stages than model.num_layers {model.num_layers}")
    if pp > 1 and model.tie_embeddings:
        raise ConfigError(
            "model.tie_embeddings needs mesh.pp 1: the first and the last stage hold one copy each"
        )
    if pp > 1 and data.micro_batches < pp:
        raise ConfigError(
            f"pp {pp} needs at least {pp} micro-batches: set data.micro_batches "
            f"(now {data.micro_batches})"
        )
