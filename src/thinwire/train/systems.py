"""What compresses which link: each system gets its part of the configuration and the ledger.

A system joins in three places: a node in `config.Systems`, a function here that attaches it, and a
line in `attach_systems`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from thinwire import aquavit
from thinwire.codecs import Blockwise
from thinwire.comm import Ledger
from thinwire.errors import ConfigError
from thinwire.train.config import Config, Weights
from thinwire.train.mesh import Layout, needs_fsdp
from thinwire.train.model import Transformer

__all__ = ["System", "attach_systems", "full_precision", "layer_errors"]


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
    """Attach every system that the configuration asks for; return them by config node.

    Raises:
        ConfigError: a system that the layout gives nothing to compress.
    """
    systems: dict[str, System] = {}
    if needs_fsdp(config, layout):
        systems["weights"] = _weights(config.systems.weights, layout, model, ledger)
    elif config.systems.weights.codec != "dense":
        _nothing_to_gather(layout, ledger)
    return systems


@contextmanager
def full_precision(systems: dict[str, System]) -> Iterator[None]:
    """Gather unquantized weights inside the block."""
    with ExitStack() as stack:
        handle = systems.get("weights")
        if isinstance(handle, aquavit.Handle):
            stack.enter_context(handle.full_precision())
        yield


def layer_errors(systems: dict[str, System]) -> dict[str, float]:
    """Return the relative squared error of each quantized parameter; collective."""
    handle = systems.get("weights")
    return handle.layer_errors() if isinstance(handle, aquavit.Handle) else {}


def _weights(cfg: Weights, layout: Layout, model: Transformer, ledger: Ledger) -> aquavit.Handle:
    schedule = None
    if cfg.codec == "static":
        if layout.sizes["dp_shard"] == 1:
            _nothing_to_gather(layout, ledger)
        else:
            schedule = aquavit.Static(Blockwise(bits=cfg.bits, block_size=cfg.block_size))
    return aquavit.attach(model, schedule, ledger=ledger, min_shard_numel=cfg.min_shard_numel)


def _nothing_to_gather(layout: Layout, ledger: Ledger) -> None:
    """Let a single rank pass (nothing travels at all); refuse several without a sharded axis."""
    if layout.mesh.size() > 1:
        raise ConfigError(
            "systems.weights compresses the gather of sharded weights, but mesh.dp_shard is 1: "
            "set mesh.dp_shard to 2 or more, or systems.weights.codec dense"
        )
    ledger.expect("weights", num_ranks=1)
