"""The sizes of the mesh axes, checked against ranks, model and batch before anything starts."""

import math
import re
from typing import Any

from thinwire.errors import ConfigError
from thinwire.train.checks import check_settings
from thinwire.train.config import Config, Mesh

__all__ = ["AXES", "check_layout", "check_ranks", "parse_replicas", "resolve_axes"]

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def resolve_axes(mesh: Mesh, num_ranks: int) -> dict[str, int]:
    """Return ranks per axis with the -1 filled in.

    Raises:
        ConfigError: the axes' product isn't `num_ranks`.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
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


def parse_replicas(text: str) -> list[dict[str, Any]]:
    """Return the tables that `mesh.replicas` stands for.

    Raises:
        ConfigError: not of the form "0 1,2:16".

    Example:
        >>> parse_replicas("0 1,2:16")
        [{'ranks': [0]}, {'ranks': [1, 2], 'rank_ratio': 16}]
    """
    tables: list[dict[str, Any]] = []
    for word in text.split():
        found = re.fullmatch(r"(\d+(?:,\d+)*)(?::(\d+))?", word)
        if found is None:
            raise ConfigError(
                f"mesh.replicas {text!r}: {word!r} is no list of ranks like 0 or 1,2:16"
            )
        table: dict[str, Any] = {"ranks": [int(rank) for rank in found[1].split(",")]}
        if found[2] is not None:
            table["rank_ratio"] = int(found[2])
        tables.append(table)
    return tables


def check_ranks(config: Config, num_ranks: int) -> dict[str, int]:
    """Return ranks per axis (of the largest replica, where replicas are unlike) after all checks.

    Raises:
        ConfigError: axes, model and batch don't fit each other or the ranks.
    """
    if not config.mesh.replicas:
        sizes = resolve_axes(config.mesh, num_ranks)
        check_layout(config, sizes)
        check_settings(config, sizes, num_ranks)
        return sizes
    tables = parse_replicas(config.mesh.replicas)
    named = sum(len(table["ranks"]) for table in tables)
    if named != num_ranks:
        raise ConfigError(
            f"mesh.replicas {config.mesh.replicas!r} names {named} ranks, but {num_ranks} run: "
            "change --nproc (of `thinwire simulate`, --ranks)"
        )
    stages = max(len(table["ranks"]) for table in tables)
    sizes = {"pp": stages, "dp_replicate": len(tables), "dp_shard": 1, "tp": 1}
    check_layout(config, sizes)
    check_settings(config, sizes, num_ranks)
    _check_mixed(config, tables)
    return sizes


def _check_mixed(config: Config, tables: list[dict[str, Any]]) -> None:
    systems = config.systems
    if systems.outer.method != "sparseloco":
        raise ConfigError("mesh.replicas needs systems.outer.method sparseloco")
    if config.compress == "auto":
        raise ConfigError(
            "compress auto chooses for equal replicas: with mesh.replicas set compress given, and "
            "weigh the ratios with `thinwire plan --cluster`"
        )
    compressed = [table for table in tables if table.get("rank_ratio")]
    dim = config.model.dim
    for table in compressed:
        if dim % table["rank_ratio"]:
            raise ConfigError(
                f"mesh.replicas {config.mesh.replicas!r}: rank_ratio {table['rank_ratio']} does "
                f"not divide model.dim {dim}: take a divisor"
            )
    if compressed and systems.pipeline.mode == "none":
        raise ConfigError("compressed replicas need systems.pipeline.mode constrained or lossy")
    if not compressed and systems.pipeline.mode != "none":
        raise ConfigError(
            "mesh.replicas names no compressed replica (1,2:16): set systems.pipeline.mode none"
        )
    if systems.pipeline.rank:
        raise ConfigError("with mesh.replicas, give ratios there and leave systems.pipeline.rank 0")
    if config.compute.dtype != "float32" or systems.storage.fmt != "dense":
        raise ConfigError(
            "mesh.replicas trains plain float32 weights: set compute.dtype float32 and "
            "systems.storage.fmt dense"
        )
    whole = len(compressed) < len(tables) or any(len(t["ranks"]) == 1 for t in tables)
    if config.evaluation.boundaries == "boundaries" and whole and compressed:
        raise ConfigError(
            "whole replicas have no boundaries to evaluate through: set evaluation.boundaries full "
            "or projected"
        )


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
    _check_storage(config, sizes)
    _check_boundaries(config, sizes)
    if pp > 1 and data.micro_batches < pp:
        raise ConfigError(
            f"pp {pp} needs at least {pp} micro-batches: set data.micro_batches "
            f"(now {data.micro_batches})"
        )


def _check_boundaries(config: Config, sizes: dict[str, int]) -> None:
    cfg = config.systems.pipeline
    if cfg.mode == "none":
        return
    if config.compute.sequence_parallel:
        raise ConfigError(
            "systems.pipeline sends whole activations from each rank of a stage: leave out "
            "compute.sequence_parallel"
        )
    model, cut = config.model, sizes["dp_shard"] * sizes["tp"]
    if cfg.mode == "constrained" and sizes["dp_shard"] > 1 and (
        model.dim % cut or model.hidden_dim % cut
    ):  # fmt: skip
        raise ConfigError(
            f"systems.pipeline.mode constrained shards output matrices by columns: mesh.dp_shard x "
            f"mesh.tp = {cut} must divide model.dim {model.dim} and model.hidden_dim "
            f"{model.hidden_dim} (mode lossy does not need it)"
        )
    if cfg.rank > config.model.dim:
        raise ConfigError(
            f"systems.pipeline.rank {cfg.rank} must not exceed model.dim {config.model.dim}"
        )


def _check_storage(config: Config, sizes: dict[str, int]) -> None:
    storage, compute = config.systems.storage, config.compute
    if storage.fmt == "dense":
        return
    if storage.only_experts and not config.model.num_experts:
        raise ConfigError("systems.storage.only_experts needs model.num_experts > 0")
    if storage.act_quant and config.model.num_experts:
        raise ConfigError("systems.storage.act_quant needs linear layers: set model.num_experts 0")
    if compute.reshard_after_forward > 0:
        raise ConfigError(
            "stored weights cannot be resharded to fewer ranks: set compute.reshard_after_forward "
            "to -1 or 0"
        )
    if compute.compile and sizes["dp_shard"] == 1:
        raise ConfigError("compute.compile with systems.storage needs mesh.dp_shard 2 or more")
    if storage.fused_backward and (
        config.optim.max_norm or config.watchdog.stuck_steps or sizes["dp_replicate"] > 1
        or sizes["pp"] > 1 or config.data.micro_batches > 1
    ):  # fmt: skip
        raise ConfigError(
            "systems.storage.fused_backward steps before the global gradient norm and sums over "
            "micro-batches or replicas are known: set optim.max_norm 0, watchdog.stuck_steps 0, "
            "data.micro_batches 1, mesh.pp 1 and mesh.dp_replicate 1"
        )
