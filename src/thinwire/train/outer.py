"""Replicas that train apart (systems.outer): the outer loop as one of the trainer's systems."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire import sparseloco
from thinwire.codecs import Blockwise, Cast, Codec
from thinwire.comm import Ledger
from thinwire.errors import CheckpointError
from thinwire.replicas import MixedReplicas
from thinwire.sparseloco.outer import OuterLoop
from thinwire.train.boundaries import Boundaries, MixedBoundaries
from thinwire.train.config import Config, Outer
from thinwire.train.mesh import Layout, MixedLayout
from thinwire.train.replicas import inner_group

__all__ = ["OUTER_CODECS", "MixedSystem", "OuterSystem", "attach_outer", "outer_options"]

OUTER_CODECS: dict[str, Codec | None] = {
    "fp32": None,
    "bf16": Cast("bf16"),
    "int8": Blockwise(bits=8, block_size=128),
}


class OuterSystem:
    """The outer loop of this replica: its metrics and its state.

    Attributes:
        loop: what follows the inner optimizer.
        replica: this replica's number, the place on dp_replicate.
    """

    def __init__(self, loop: OuterLoop, layout: Layout) -> None:
        self.loop, self.replica = loop, layout.index("dp_replicate")
        self.num_replicas = layout.sizes["dp_replicate"]
        self._told = loop.last
        self._saved, self._moved = [self.replica], False

    def count(self, tokens: int) -> None:
        """Add tokens that this replica is about to step on."""
        self.loop.count(tokens)

    def finish(self) -> None:
        """End the round that is open, if it has steps."""
        if self.loop.steps:
            self.loop.end_round()

    def shared_weights(self) -> AbstractContextManager[None]:
        """Return a context in which parameters hold the weights all replicas share."""
        return self.loop.shared_weights()

    def metrics(self) -> dict[str, Any]:
        """Return how a round ended, in the step that ended it."""
        if self.loop.last is self._told:
            return {}
        self._told = self.loop.last
        return {"outer": self.loop.metrics()}

    def expect(self, mesh: Mapping[str, int]) -> None:
        """Prepare to load a checkpoint: another number of replicas needs the parts of all."""
        saved = mesh["dp_replicate"]
        self._moved = saved != self.num_replicas
        self._saved = list(range(saved)) if self._moved else [self.replica]

    @property
    def heir(self) -> int:
        """Return the saved replica whose weights and moments this one goes on from."""
        return self._saved[self.replica % len(self._saved)]

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's part, or one like it for each replica to be loaded."""
        part = self.loop.state_dict()
        if part["core"] is None:
            del part["core"]
        return {"parts": {f"replica{r}": _copy(part) for r in self._saved}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the parts; see `OuterLoop.load_state_dict` on changed numbers of replicas.

        Raises:
            CheckpointError: replicas were added in the middle of a round.
        """
        parts = [{"core": None} | part for part in state["parts"].values()]
        added = self._moved and self.num_replicas > len(self._saved)
        if added and parts[0]["progress"]:
            raise CheckpointError(
                f"replicas can be added between rounds only, and {parts[0]['progress']} steps of "
                "one are in this checkpoint: save at a multiple of systems.outer.sync_every"
            )
        self.loop.load_state_dict(parts)
        self._saved, self._moved, self._told = [self.replica], False, self.loop.last


def attach_outer(
    config: Config,
    layout: Layout,
    model: nn.Module,
    optimizer: Optimizer,
    ledger: Ledger,
    boundaries: Boundaries | None = None,
) -> OuterSystem | None:
    """Return the outer loop that the configuration asks for, or None; collective."""
    cfg = config.systems.outer
    if cfg.method == "none":
        return None
    if isinstance(layout, MixedLayout):
        return _attach_mixed(config, layout, optimizer, boundaries, ledger)
    where: dict[str, Any] = {
        "sync_every": cfg.sync_every,
        "group": layout.group("dp_replicate"),
        "inner_group": inner_group(layout),
        "ledger": ledger,
    }
    loop: OuterLoop
    if cfg.method == "sparseloco":
        loop = sparseloco.SparseLoCo(model, optimizer, options=outer_options(cfg), **where)
    else:
        codec, momentum = OUTER_CODECS[cfg.codec], cfg.momentum
        loop = sparseloco.DiLoCo(
            model, optimizer, alpha=cfg.alpha, momentum=momentum, codec=codec, **where
        )
    return OuterSystem(loop, layout)


class MixedSystem(OuterSystem):
    """The outer loop of unlike replicas: figures of every rank in the step that ends a round.

    Attributes:
        figures: of each rank after the last round.
    """

    loop: MixedReplicas

    def __init__(self, loop: MixedReplicas, layout: MixedLayout, boundaries: Boundaries) -> None:
        super().__init__(loop, layout)
        self.boundaries = boundaries
        self.figures: list[dict[str, Any]] = []
        self._measured = loop.last

    def shared_weights(self, mode: str = "full") -> AbstractContextManager[None]:
        """Return a context in which parameters hold the shared weights (see `MixedReplicas`)."""
        return self.loop.shared_weights(mode)

    def measure(self) -> None:
        """Gather the ranks' figures if a round has just ended; collective over the world."""
        if self.loop.last is self._measured:
            return
        self._measured = self.loop.last
        self.figures = self.loop.gather_figures()

    def metrics(self) -> dict[str, Any]:
        """Return how a round ended, and each rank's figures, in the step that ended it."""
        found = super().metrics()
        return found | {"replicas": self.figures} if found else {}


def _attach_mixed(
    config: Config,
    layout: MixedLayout,
    optimizer: Optimizer,
    boundaries: Boundaries | None,
    ledger: Ledger,
) -> MixedSystem:
    assert isinstance(boundaries, MixedBoundaries)
    loop = MixedReplicas(
        boundaries.stage,
        optimizer,
        layout.site,
        sync_every=config.systems.outer.sync_every,
        options=outer_options(config.systems.outer),
        ledger=ledger,
    )
    boundaries.loop = loop
    return MixedSystem(loop, layout, boundaries)


def outer_options(cfg: Outer) -> sparseloco.Options:
    """Return what sparseloco sends, by the configuration."""
    return sparseloco.Options(
        alpha=cfg.alpha,
        beta=cfg.beta,
        k=cfg.k,
        quant=cfg.quant,
        level_dtype=cfg.level_dtype,
        chunking=cfg.chunking,
        small_dense=cfg.small_dense,
        aggregate=cfg.aggregate,
        weights=cfg.weights,
        median_clip=cfg.median_clip,
        min_quorum=cfg.min_quorum,
        check_every=cfg.check_every,
    )


def _copy(part: Any) -> Any:
    if isinstance(part, dict):
        return {k: _copy(v) for k, v in part.items()}
    return part.clone() if isinstance(part, Tensor) else part
