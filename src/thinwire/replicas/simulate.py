"""Unlike replicas as virtual ones in one process: the same boundaries, anchors and messages.

For studies of quality: nothing travels, everything is computed as if it did.

Legend: `B` sequences, `T` tokens, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.pipeline import Basis, Constraint, FixedRows, Link, Stage, find_writes
from thinwire.replicas.anchor import pseudo_gradient
from thinwire.replicas.layout import Layout
from thinwire.sparseloco import Options, Outcome, Partition, simulate_round

__all__ = ["Simulation", "VirtualReplica"]

Build = Callable[[int, int], nn.Module]


@dataclass
class VirtualReplica:
    """One replica, its stages chained in this process.

    Attributes:
        stages: in order.
        optimizer: over all stages.
        part: shared weights and residual.
        constraints: of the stages that have one.
        tables: fixed rows of the embedding, None in a plain full replica.
        tokens: processed in the open round.
    """

    stages: list[Stage]
    optimizer: Optimizer
    part: Partition
    constraints: list[Constraint]
    tables: FixedRows | None
    tokens: int = 0

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Return trained parameters by name."""
        named = (pair for s in self.stages for pair in s.module.named_parameters())
        return {name: p for name, p in named if p.requires_grad}

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the output [B, T, V], through all boundaries."""
        out = self.stages[0](ids_BT)
        for stage in self.stages[1:]:
            out = stage(*(out if isinstance(out, tuple) else (out,)))
        return out

    def forward_plain(self, ids_BT: Tensor) -> Tensor:
        """Return the output [B, T, V] as if no boundary were there."""
        out: Tensor = ids_BT
        for stage in self.stages:
            out = stage.module(out)
        return out

    def project_gradients(self) -> None:
        """Project gradients, before their norm is taken."""
        for constraint in self.constraints:
            constraint.project_gradients()

    def constraint_of(self, name: str) -> Constraint | None:
        """Return what projects a parameter, if anything does."""
        return next((c for c in self.constraints if name in c.names), None)


class Simulation:
    """The replicas of a layout in one process.

    Args:
        layout: its ranks only say how many stages a replica has.
        build: makes (stage index, number of stages) with equal weights in every call.
        make_optimizer: from named parameters.
        basis: of the compressed replicas.
        options: of SparseLoCo; None for the defaults.
        wire: dtype or codec of boundary coefficients.
        embedding: name of the embedding rows.

    Attributes:
        replicas: one per replica of the layout.

    Example:
        >>> for step in range(30):
        ...     for replica, (x, y) in zip(simulation.replicas, batches(step)):
        ...         loss(replica.forward(x), y).backward()
        ...         replica.project_gradients(); replica.optimizer.step()
        ...         replica.optimizer.zero_grad(); replica.tokens += x.numel()
        >>> simulation.end_round()
    """

    def __init__(
        self,
        layout: Layout,
        build: Build,
        make_optimizer: Callable[[dict[str, nn.Parameter]], Optimizer],
        basis: Basis,
        *,
        options: Options | None = None,
        wire: str = "bf16",
        embedding: str = "embed.weight",
    ) -> None:
        self.layout, self.basis, self.embedding = layout, basis, embedding
        self.options = options or Options()
        self._wire = wire
        self.confined: set[str] = set()
        made = [self._stages(index, build) for index in range(len(layout.replicas))]
        self.replicas: list[VirtualReplica] = []
        for index, (stages, start, tables) in enumerate(made):
            params = {n: p for s in stages for n, p in s.module.named_parameters()}
            constraints = [s.constraint for s in stages if s.constraint is not None]
            if layout.constrain_full and not layout.replicas[index].rank_ratio:
                tables = FixedRows.of(basis, start[embedding])
                writes = {n: params[n] for n in params if n in self.confined}
                rows = {embedding: (params[embedding], tables.tokens)}
                constraints = [Constraint(basis, writes, rows)]
            optimizer = make_optimizer({n: p for n, p in params.items() if p.requires_grad})
            for constraint in constraints:
                constraint.attach(optimizer)
            part = Partition(start, self.options, replica=index, roster=range(len(made)))
            self.replicas.append(VirtualReplica(stages, optimizer, part, constraints, tables))
        self._begin()

    def _stages(
        self, index: int, build: Build
    ) -> tuple[list[Stage], dict[str, Tensor], FixedRows | None]:
        replica = self.layout.replicas[index]
        # A full replica's stages exchange dense activations: one piece is the same.
        count = replica.num_stages if replica.rank_ratio else 1
        modules = [build(i, count) for i in range(count)]
        link = Link(
            self.basis,
            num_stages=count,
            mode=self.layout.mode if replica.rank_ratio else "none",
            wire=self._wire,
        )
        first = dict(modules[0].named_parameters())
        link.share(first[self.embedding])
        start = {
            n: p.detach().clone()
            for m in modules
            for n, p in m.named_parameters()
            if p.requires_grad
        }
        stages = [link.wrap(m, i, embedding=self.embedding) for i, m in enumerate(modules)]
        for stage in stages if replica.rank_ratio else []:
            if count == 1 or stage.after != "none":
                self.confined |= set(find_writes(stage.module, self.basis.dim))
        return stages, start, link.tables

    @torch.no_grad()
    def _begin(self) -> None:
        """Start a round from the shared weights, as each replica's role asks."""
        for replica in self.replicas:
            theta = replica.part.theta
            for name, p in replica.params.items():
                p.copy_(theta[name])
            if replica.tables is not None:
                replica.tables.resplit(self.basis, theta[self.embedding])
            for constraint in replica.constraints:
                constraint.project()
            for stage in replica.stages:
                stage.round = replica.part.round
            replica.tokens = 0

    @torch.no_grad()
    def end_round(self) -> list[Outcome]:
        """Exchange the replicas' messages and start the next round; an outcome per replica."""
        projected = self.layout.anchor == "projected"

        def delta_of(replica: VirtualReplica) -> Callable[[str], Tensor]:
            params, theta = replica.params, replica.part.theta

            def delta(name: str) -> Tensor:
                constraint = replica.constraint_of(name) if projected else None
                return pseudo_gradient(name, theta[name], params[name].detach(), constraint)

            return delta

        outcomes = simulate_round(
            [r.part for r in self.replicas],
            [delta_of(r) for r in self.replicas],
            [r.tokens for r in self.replicas],
        )
        self._begin()
        return outcomes

    @torch.no_grad()
    def shared_loss(self, loss: Callable[[Tensor], Tensor], ids_BT: Tensor, mode: str) -> float:
        """Return the loss of the shared weights, between rounds.

        Args:
            loss: of an output [B, T, V].
            ids_BT: tokens.
            mode: "full" (as they are), "projected", or "boundaries" (projected, and through the
                boundaries of the first compressed replica).

        Raises:
            ConfigError: "boundaries" without a compressed replica.
        """
        chosen = self.replicas[0]
        if mode == "boundaries":
            found = [r for r in self.replicas if any(s.after == "wire" for s in r.stages)]
            if not found:
                raise ConfigError("no replica has boundaries to evaluate through")
            return loss(found[0].forward(ids_BT)).item()
        kept = {n: p.detach().clone() for n, p in chosen.params.items()}
        for name, p in chosen.params.items():
            p.copy_(chosen.part.theta[name])
            if mode == "projected" and name in self.confined:
                p.copy_(self.basis.keep_columns(p.detach()))
        value = loss(chosen.forward_plain(ids_BT)).item()
        for name, p in chosen.params.items():
            p.copy_(kept[name])
        return value
