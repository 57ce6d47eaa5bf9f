"""What a configuration cannot do on its ranks, said before anything starts.

`check_settings` runs on every rank too; `check_surroundings` looks at this machine's files and runs
once, where the command line is read. Nothing here imports torch.
"""

import importlib.util
import os
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.train.config import Config
from thinwire.train.sources import check_source
from thinwire.train.support import METHODS, asked_for, check_together

__all__ = ["check_settings", "check_surroundings"]


def check_settings(config: Config, sizes: dict[str, int], num_ranks: int) -> None:
    """Refuse settings that do not fit each other or the ranks.

    Args:
        config: what is to run.
        sizes: ranks per axis; with mesh.replicas those of the largest replica.
        num_ranks: ranks of the world.

    Raises:
        ConfigError: in one line that names the settings.
    """
    check_together(config)
    _check_axes(config, sizes, num_ranks)
    _check_virtual(config, sizes, num_ranks)
    _check_weights(config)
    _check_storage(config)
    _check_replicas(config, sizes)
    _check_outer(config, sizes)
    _check_ratio(config)


def check_surroundings(config: Config) -> None:
    """Refuse what this machine lacks: text, a file to start from, a folder to write to, an extra.

    Raises:
        ConfigError, DataError: in one line.
    """
    check_source(config.data.source, config.data.seq_len_tokens)
    if config.init and not Path(config.init).is_file():
        raise ConfigError(
            f"cannot start from init {config.init}: no such file; export a run with `thinwire "
            f"export RUN --out {config.init}`"
        )
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs the extra: pip install 'thinwire[tb]'")
    out = Path(config.out).absolute()
    there = next(path for path in (out, *out.parents) if path.exists())
    if not os.access(there, os.W_OK):
        raise ConfigError(f"cannot write to out folder {config.out}: {there} is not writable")


def _check_axes(config: Config, sizes: dict[str, int], num_ranks: int) -> None:
    """Let a single rank pass (nothing travels at all); refuse several that leave a link empty."""
    if num_ranks == 1:
        return
    for key in asked_for(config):
        method = METHODS[key]
        if key == "baseline":
            _check_whole_replicas(config, sizes)
        elif config.mesh.replicas and method.axis in ("dp_shard", "tp"):
            raise ConfigError(
                f"{method.said(config)} compresses traffic of mesh.{method.axis}, which "
                f"mesh.replicas has not: set {method.setting} dense"
            )
        elif method.axis and sizes[method.axis] == 1:
            off = {"pp": "none", "dp_replicate": "adamw" if key == "sparse" else "none"}
            raise ConfigError(
                f"{method.said(config)} compresses traffic of mesh.{method.axis}, but "
                f"mesh.{method.axis} is 1: set mesh.{method.axis} to 2 or more, or "
                f"{method.setting} {off.get(method.axis, 'dense')}"
            )


def _check_whole_replicas(config: Config, sizes: dict[str, int]) -> None:
    cfg = config.systems.replicas
    if any(sizes[axis] > 1 for axis in ("pp", "dp_shard", "tp")):
        raise ConfigError(
            f"systems.replicas.optimizer {cfg.optimizer} synchronizes whole replicas: set "
            "mesh.dp_replicate -1 and all other axes 1"
        )


def _check_virtual(config: Config, sizes: dict[str, int], num_ranks: int) -> None:
    weights, tensor = config.systems.weights, config.systems.tensor
    if tensor.virtual_ranks and sizes["tp"] > 1:
        raise ConfigError("systems.tensor.virtual_ranks simulates tp ranks on one: use --nproc 1")
    if tensor.virtual_ranks and config.model.num_kv_heads % tensor.virtual_ranks:
        raise ConfigError(
            f"systems.tensor.virtual_ranks {tensor.virtual_ranks} must divide model.num_kv_heads "
            f"{config.model.num_kv_heads}"
        )
    compresses = weights.codec != "dense" or config.systems.gradients.codec != "dense"
    simulates = weights.codec != "dense" and config.systems.gradients.codec == "dense"
    if weights.virtual_ranks and compresses and (num_ranks > 1 or not simulates):
        raise ConfigError(
            "systems.weights.virtual_ranks simulates compressed weights with dense gradients on "
            "one rank: use --nproc 1 and systems.gradients.codec dense"
        )
    if tensor.node_size and sizes["tp"] % tensor.node_size:
        raise ConfigError(
            f"systems.tensor.node_size {tensor.node_size} must divide mesh.tp {sizes['tp']}"
        )


def _check_weights(config: Config) -> None:
    if config.systems.weights.codec == "difference" and config.systems.storage.fmt != "dense":
        raise ConfigError(
            "systems.weights.codec difference keeps a full-precision copy, which systems.storage "
            f"{config.systems.storage.fmt} does without: take aquavit or static"
        )


def _check_storage(config: Config) -> None:
    storage, outer = config.systems.storage, config.systems.outer
    if storage.fmt == "dense":
        return
    if config.systems.replicas.optimizer == "adams":
        raise ConfigError(
            f"systems.storage.fmt {storage.fmt} steps weights by EcoAdamW: it goes with "
            "systems.replicas.optimizer adamw, not adams"
        )
    if outer.method == "none":
        return
    if storage.error in ("master", "kahan"):
        raise ConfigError(
            f"systems.storage.error {storage.error} keeps a second copy of each weight, which "
            f"systems.outer.method {outer.method} would leave behind: set it to momentum or drop"
        )
    if storage.check_every_steps:
        raise ConfigError(
            "systems.storage.check_every_steps compares replicas, which differ between the rounds "
            "of systems.outer: set it to 0 (systems.outer.check_every compares what they share)"
        )


def _check_replicas(config: Config, sizes: dict[str, int]) -> None:
    cfg, max_norm = config.systems.replicas, config.optim.max_norm
    if cfg.optimizer == "powersgd-ddp" and (config.checkpoints.every_steps or config.stop_after):
        raise ConfigError(
            "systems.replicas.optimizer powersgd-ddp keeps its residuals inside torch's hook, "
            "which no checkpoint holds: use powersgd, or no checkpoints"
        )
    if cfg.optimizer not in ("scape", "topk-adamw"):
        return
    if cfg.clip != "rms" and max_norm and sizes["pp"] > 1:
        raise ConfigError(
            f"systems.replicas.clip {cfg.clip} sees one pipeline stage: use rms with mesh.pp > 1"
        )
    if cfg.move_all and cfg.unmasked != "decay":
        raise ConfigError(
            "systems.replicas.move_all steps momentum off the mask, which unmasked transfer sets "
            "to 0: set systems.replicas.unmasked decay"
        )
    if not cfg.overlap:
        return
    if max_norm and cfg.clip != "reconstructed":
        raise ConfigError(
            "systems.replicas.overlap sends values before their norm is known: set "
            "systems.replicas.clip reconstructed or optim.max_norm 0"
        )
    if sizes["pp"] > 1:
        raise ConfigError("systems.replicas.overlap needs mesh.pp 1: stages own their backward")
    if config.compute.sequence_parallel and sizes["tp"] > 1:
        raise ConfigError(
            "systems.replicas.overlap sends values before compute.sequence_parallel has summed "
            "them over the pieces of the sequence: leave one of them out"
        )


def _check_outer(config: Config, sizes: dict[str, int]) -> None:
    outer = config.systems.outer
    if outer.method == "none":
        return
    if sizes["pp"] > 1 and not config.mesh.replicas:
        raise ConfigError(
            f"systems.outer.method {outer.method} gathers whole replicas: set mesh.pp 1, or name "
            "replicas of several stages in mesh.replicas (sparseloco)"
        )
    replicas = sizes["dp_replicate"]
    if outer.min_quorum > replicas:
        raise ConfigError(
            f"systems.outer.min_quorum {outer.min_quorum} can't be met by {replicas} replicas: no "
            "round would ever commit"
        )


def _check_ratio(config: Config) -> None:
    cfg, dim = config.systems.pipeline, config.model.dim
    if cfg.mode != "none" and not cfg.rank and not config.mesh.replicas and dim % cfg.ratio:
        raise ConfigError(
            f"systems.pipeline.ratio {cfg.ratio} does not divide model.dim {dim}: take a divisor, "
            f"or say systems.pipeline.rank {max(1, dim // cfg.ratio)}"
        )
