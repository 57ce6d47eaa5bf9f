"""What compresses which link: each system gets its part of the configuration and the ledger.

A system joins in three places: a node in `config.Systems`, a function here that attaches it, and a
line in `attach_systems`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from thinwire import aquavit
from thinwire.codecs import Blockwise, Cast, Codec, Hadamard
from thinwire.comm import Ledger
from thinwire.train.boundaries import attach_boundaries
from thinwire.train.config import Config, Gradients, Weights
from thinwire.train.mesh import Layout, MixedLayout, needs_fsdp
from thinwire.train.model import Transformer
from thinwire.train.outer import OuterSystem
from thinwire.train.tensor import TensorTraffic

__all__ = [
    "System",
    "attach_systems",
    "full_precision",
    "gradient_codec",
    "layer_errors",
    "weight_schedule",
]


class System(Protocol):
    """What the loop needs of an attached system."""

    def metrics(self) -> dict[str, float]:
        """Return what belongs into a line of metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what resume needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


def attach_systems(
    config: Config, layout: Layout, model: Transformer, ledger: Ledger
) -> dict[str, System]:
    """Attach every system that the configuration asks for; return them by config node."""
    systems: dict[str, System] = {}
    if needs_fsdp(config, layout):
        systems["weights"] = _attach_fsdp(config, layout, model, ledger)
    elif config.systems.weights.virtual_ranks and _compresses(config):
        systems["weights"] = _simulate(config, model)
    elif _compresses(config):
        ledger.expect("weights", num_ranks=1)
    if config.systems.pipeline.mode != "none" or isinstance(layout, MixedLayout):
        boundaries = attach_boundaries(config, layout, model, ledger)
        if boundaries is not None:
            systems["pipeline"] = boundaries
    if config.systems.tensor.nonfinite != "raise":
        systems["tensor"] = TensorTraffic(ledger)
    return systems


@contextmanager
def full_precision(systems: dict[str, System]) -> Iterator[None]:
    """Gather unquantized (and, of replicas that train apart, shared) weights inside the block."""
    with ExitStack() as stack:
        outer = systems.get("outer")
        if isinstance(outer, OuterSystem):
            stack.enter_context(outer.shared_weights())
        handle = systems.get("weights")
        if isinstance(handle, aquavit.Handle):
            stack.enter_context(handle.full_precision())
        yield


def layer_errors(systems: dict[str, System]) -> dict[str, float]:
    """Return the relative squared error of each quantized parameter; collective."""
    handle = systems.get("weights")
    return handle.layer_errors() if isinstance(handle, aquavit.Handle) else {}


def _attach_fsdp(
    config: Config, layout: Layout, model: Transformer, ledger: Ledger
) -> aquavit.Handle:
    weights, gradients = config.systems.weights, config.systems.gradients
    schedule, reduce_codec = None, None
    if layout.sizes["dp_shard"] > 1:
        schedule = weight_schedule(weights, config.steps)
        reduce_codec = gradient_codec(gradients)
    elif _compresses(config):
        ledger.expect("weights", num_ranks=1)
    return aquavit.attach(
        model,
        schedule,
        ledger=ledger,
        keep_wire=weights.keep_wire,
        gradients=reduce_codec,
        error_feedback=gradients.error_feedback and reduce_codec is not None,
        min_shard_numel=weights.min_shard_numel,
    )


def _simulate(config: Config, model: Transformer) -> aquavit.SimulatedHandle:
    cfg = config.systems.weights
    schedule = weight_schedule(cfg, config.steps)
    assert schedule is not None
    return aquavit.simulate(
        model, schedule, num_ranks=cfg.virtual_ranks, min_shard_numel=cfg.min_shard_numel
    )


def _compresses(config: Config) -> bool:
    return config.systems.weights.codec != "dense" or config.systems.gradients.codec != "dense"


def weight_schedule(
    cfg: Weights, steps: int
) -> aquavit.Schedule | aquavit.Static | aquavit.Difference | None:
    """Return how weight gathers travel over a run of `steps`; None: as they are."""
    if cfg.codec == "dense":
        return None
    if cfg.codec == "bf16":
        return aquavit.Static(Cast("bf16"))
    if cfg.codec == "aquavit":
        return aquavit.Schedule(
            steps,
            a=cfg.a,
            c=cfg.c,
            levels=cfg.levels,
            curve=cfg.curve,
            pick=cfg.pick,
            # With one block size for all levels, bits per weight say no more than the width.
            measure="payload" if cfg.levels == "widths" else "bpw",
        )
    codec = Blockwise(bits=cfg.bits, block_size=cfg.block_size, symmetric=cfg.symmetric)
    return aquavit.Static(codec) if cfg.codec == "static" else aquavit.Difference(codec)


def gradient_codec(cfg: Gradients) -> Codec | None:
    """Return how the gradient reduce-scatter travels; None: as it is."""
    if cfg.codec == "dense":
        return None
    if cfg.hadamard:
        return Hadamard(fmt=cfg.codec, group=cfg.block_size)
    return Blockwise(bits=8 if cfg.codec == "int8" else 4, block_size=cfg.block_size)
