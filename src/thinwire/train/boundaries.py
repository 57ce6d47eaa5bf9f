"""Compressed pipeline boundaries in the trainer: set-up, metrics, state, evaluation modes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from thinwire.comm import Ledger
from thinwire.pipeline import Basis, Constraint, Link, Stage, find_writes
from thinwire.replicas import MixedReplicas
from thinwire.train.config import Config
from thinwire.train.mesh import Layout, MixedLayout
from thinwire.train.model import Transformer

__all__ = ["Boundaries", "MixedBoundaries", "attach_boundaries"]


class Boundaries:
    """This rank's stage between its boundaries, as one of the loop's systems.

    Attributes:
        link: what the pipeline's ranks share.
        stage: the wrapped stage, for torch's schedule.
    """

    def __init__(self, link: Link, stage: Stage) -> None:
        self.link, self.stage = link, stage
        self._health = 0.0

    def attach(self, optimizer: Optimizer) -> None:
        """Keep weights in the subspace after the optimizer's steps (constrained mode)."""
        if self.stage.constraint is not None:
            self.stage.constraint.attach(optimizer)

    def project_gradients(self) -> None:
        """Project gradients before their norm is taken."""
        if self.stage.constraint is not None:
            self.stage.constraint.project_gradients()

    @contextmanager
    def projected(self) -> Iterator[None]:
        """Project output matrices within the block, all stages but the last."""
        if self.stage.after == "none":
            yield
            return
        basis = self.link.basis
        constraint = Constraint(basis, find_writes(self.stage.module, basis.dim))
        kept = [p.detach().clone() for p in constraint.writes.values()]
        constraint.project()
        yield
        with torch.no_grad():
            for p, before in zip(constraint.writes.values(), kept, strict=True):
                p.copy_(before)

    def check_health(self) -> None:
        """Measure the share of activations that boundaries lost; collective over the world.

        Raises:
            ContractError: too large for constrained mode, on every rank.
        """
        self._health = self.link.check_health(dist.group.WORLD)

    def metrics(self) -> dict[str, float]:
        """Return the largest share of activations off the subspace, of all ranks."""
        return {"boundary_off": self._health}

    def state_dict(self) -> dict[str, Any]:
        """Return the basis and the fixed rows, equal on all ranks."""
        state: dict[str, Any] = {"basis": self.link.basis.state_dict()}
        if self.link.tables is not None:
            state["fixed_rows"] = self.link.tables.tokens.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.link.basis.load_state_dict(state["basis"])
        if self.link.tables is not None:
            self.link.tables.tokens.copy_(state["fixed_rows"])


class MixedBoundaries(Boundaries):
    """The same among unlike replicas, whose outer loop projects and splits.

    Attributes:
        loop: the outer loop, once it is made.
    """

    loop: MixedReplicas | None = None

    def __init__(self, link: Link, stage: Stage, strict: bool) -> None:
        super().__init__(link, stage)
        self.strict = strict

    def check_health(self) -> None:
        """See `Boundaries`; full replicas raise with the others, NaN is the outer round's."""
        self._health = self.link.check_health(
            dist.group.WORLD, strict=self.strict, skip_nonfinite=True
        )

    def attach(self, optimizer: Optimizer) -> None:
        """Leave the optimizer to the outer loop."""

    def project_gradients(self) -> None:
        """Project gradients before their norm is taken."""
        if self.loop is not None:
            self.loop.project_gradients()

    @contextmanager
    def projected(self) -> Iterator[None]:
        """Leave projecting to the outer loop's shared weights."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the basis; the fixed rows follow from the shared embedding."""
        return {"basis": self.link.basis.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.link.basis.load_state_dict(state["basis"])


def attach_boundaries(
    config: Config, layout: Layout, model: Transformer, ledger: Ledger
) -> Boundaries | None:
    """Wrap this rank's stage as the configuration asks; collective.

    Returns:
        None where a single rank has nothing to send.

    Raises:
        ConfigError: weights that can't be constrained.
    """
    cfg, dim = config.systems.pipeline, config.model.dim
    if isinstance(layout, MixedLayout):
        return _attach_mixed(config, layout, model, ledger)
    stages = layout.sizes["pp"]
    if stages == 1:
        ledger.expect("pipeline", num_ranks=1)
        return None
    basis = Basis(dim, cfg.rank or Basis.rank_of(dim, cfg.ratio), config.seed, cfg.basis)
    # Replicas of a stage must project alike too, not only the stages of one pipeline.
    world = dist.group.WORLD
    assert world is not None
    basis.agree(world, device=layout.device, ledger=ledger)
    link = Link(
        basis,
        num_stages=stages,
        mode=cfg.mode,
        wire=cfg.wire,
        ids=cfg.ids,
        activations=getattr(torch, config.compute.dtype),
        group=layout.group("pp"),
        device=layout.device,
        noisy=_is_noisy(config),
        ledger=ledger,
    )
    link.share(model.embed.weight if model.is_first else None)
    return Boundaries(link, link.wrap(model, layout.index("pp")))


def _is_noisy(config: Config) -> bool:
    """Return whether blocks compute with rounded weights or messages."""
    systems = config.systems
    return systems.weights.codec != "dense" or systems.tensor.codec != "dense"


def _attach_mixed(
    config: Config, layout: MixedLayout, model: Transformer, ledger: Ledger
) -> MixedBoundaries:
    """Wrap this rank's stage as its replica's role asks; collective."""
    cfg, site = config.systems.pipeline, layout.site
    site.ledger = ledger
    basis = site.basis(config.model.dim, config.seed, cfg.basis)
    stage = site.wrap(model, basis, wire=cfg.wire, ids=cfg.ids)
    assert site.link is not None
    strict = site.layout.ratio > 0 and site.layout.mode == "constrained"
    return MixedBoundaries(site.link, stage, strict)
