"""Recipes: functions that return a configuration, found by name in one dict."""

from collections.abc import Callable
from dataclasses import replace

from thinwire.train.config import Config, Data, Mesh, Systems, Weights
from thinwire.train.parse import near

__all__ = ["DEFAULT", "RECIPES", "recipe"]

DEFAULT = "static-6bit"


def dense_ddp() -> Config:
    """Whole model on every rank, gradients averaged by all-reduce."""
    return Config(mesh=Mesh(dp_replicate=-1, dp_shard=1))


def dense_fsdp() -> Config:
    """FSDP2 over all ranks, nothing compressed."""
    return Config()


def dense_tp() -> Config:
    """Tensor parallel over all ranks, nothing compressed."""
    return Config(mesh=Mesh(dp_shard=1, tp=-1))


def dense_pp() -> Config:
    """One pipeline stage per rank (1F1B, 4 micro-batches), nothing compressed."""
    return Config(mesh=Mesh(dp_shard=1, pp=-1), data=Data(micro_batches=4))


def dense_3d() -> Config:
    """Two pipeline stages x FSDP2 over the rest x tensor parallel 2: 4, 8, ... ranks."""
    return Config(mesh=Mesh(pp=2, dp_shard=-1, tp=2), data=Data(micro_batches=2))


def static_8bit() -> Config:
    """FSDP2 with weight gathers of 8 bits per weight."""
    return _static(8)


def static_6bit() -> Config:
    """FSDP2 with weight gathers of 6 bits per weight."""
    return _static(6)


def static_4bit() -> Config:
    """FSDP2 with weight gathers of 4 bits per weight."""
    return _static(4)


def _static(bits: int) -> Config:
    weights = replace(Weights(codec="static"), bits=bits)  # type: ignore[arg-type]
    return Config(systems=Systems(weights=weights))


RECIPES: dict[str, Callable[[], Config]] = {
    "dense-ddp": dense_ddp,
    "dense-fsdp": dense_fsdp,
    "dense-tp": dense_tp,
    "dense-pp": dense_pp,
    "dense-3d": dense_3d,
    "static-8bit": static_8bit,
    "static-6bit": static_6bit,
    "static-4bit": static_4bit,
}


def recipe(name: str) -> Config:
    """Return the configuration of a recipe.

    Raises:
        ConfigError: no recipe has this name; the message suggests the nearest.
    """
    if name not in RECIPES:
        raise near("recipe", name, list(RECIPES))
    return replace(RECIPES[name](), recipe=name)
