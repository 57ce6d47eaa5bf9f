"""`MixedReplicas`: SparseLoCo between whole replicas and pipelines of weak nodes.

A round of a compressed replica, with theta the weights that all replicas share bit for bit:
1. weights = theta; the embedding splits anew (T_S = E P, T_perp = E - T_S); output matrices P W.
   What results is the anchor: against theta itself a replica would report (1 - P) theta as
   learning and drag the shared weights into its subspace.
2. H inner steps, each with projected gradients and weights (`thinwire.pipeline.Constraint`).
3. delta = anchor - weights; messages, mean and commit as in SparseLoCo, partition by partition.
A full replica is a plain one: anchor = theta, nothing projected (but see `constrain_full`).
Theta itself is never projected: products on unlike hardware would break its bit equality, and
projecting at the start of a round trains the same.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire import comm
from thinwire.comm import Ledger
from thinwire.errors import CheckpointError, ConfigError, ContractError
from thinwire.pipeline import Constraint, FixedRows, Stage, find_writes
from thinwire.replicas.anchor import pseudo_gradient
from thinwire.replicas.ownership import divide
from thinwire.replicas.rounds import Follower, MixedRound
from thinwire.replicas.site import Site
from thinwire.sparseloco import (
    GroupTransport,
    Options,
    Outcome,
    Partition,
    Table,
    load_partition,
)
from thinwire.sparseloco.outer import OuterLoop
from thinwire.sparseloco.partition import Delta, fingerprint

__all__ = ["MixedReplicas"]


class MixedReplicas(OuterLoop):
    """Train unlike replicas apart for `sync_every` steps, then exchange sparse messages.

    Args:
        stage: this rank's stage, from `Site.wrap`.
        inner_optimizer: over the stage module's parameters; its `step` is followed, and in
            compressed replicas weights are projected behind it. Before clipping call
            `project_gradients`, and take the norm over all ranks of the replica (`Site.inner`).
        site: this rank's place.
        sync_every: inner steps of a round.
        options: codec and mean; None for the defaults.
        embedding: name of the embedding rows.
        ledger: books every byte.
        device: where shared weights and residuals live; None: beside the parameters.

    Attributes:
        shares: partitions of all ranks.
        constraint: what keeps this rank's writes in the subspace, None where nothing does.

    Raises:
        ConfigError: replicas that train different parameters, or settings that don't fit.
        ContractError: replicas start from different weights; on all of them.

    Example:
        >>> site = Site(Layout(replicas=(Replica(ranks=(0,)),
        ...                              Replica(ranks=(1, 2), rank_ratio=16))))
        >>> stage = site.wrap(module, site.basis(dim=2048))
        >>> outer = MixedReplicas(stage, optimizer, site, sync_every=30)

    Reference: Obeidi et al., "Heterogeneous Low-Bandwidth Pre-Training of LLMs", arXiv 2601.02360.
    """

    def __init__(
        self,
        stage: Stage,
        inner_optimizer: Optimizer | None,
        site: Site,
        *,
        sync_every: int = 30,
        options: Options | None = None,
        embedding: str = "embed.weight",
        ledger: Ledger | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.stage, self.site, self.options = stage, site, options or Options()
        self.embedding = embedding
        module = stage.module
        trained = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
        held = _gather((trained, _confined(stage, site), _boundary_settings(stage, site)))
        self.shares = divide(site.layout, [h[0] for h in held], embedding)
        settings = _same_settings([h[2] for h in held])
        shapes = {name: shape for h in held for name, shape in h[0].items()}
        for share in self.shares:  # of all ranks: what one can't send, all refuse
            Table({name: shapes[name] for name in share.names}, self.options)
        self.confined = {name for h in held for name in h[1]}
        self.constraint = stage.constraint
        self._own_tables: FixedRows | None = None
        if site.replica.role == "full" and site.layout.constrain_full:
            self.constraint = self._constrain_full(module)
        # Hooked on before the count of steps, so that a round ends with projected weights.
        self._attached = None
        if self.constraint is not None and inner_optimizer is not None:
            self._attached = self.constraint.attach(inner_optimizer)
        super().__init__(
            module, inner_optimizer, sync_every=sync_every, inner_group=None, ledger=ledger
        )
        where = None if device is None else torch.device(device)
        self.core = self._core = self._build(settings, where, ledger)
        self.fingerprints()
        self.inner.place(self._core.theta)
        self._place_again()

    def _build(
        self, settings: str, device: torch.device | None, ledger: Ledger | None
    ) -> "_MixedCore":
        site, rank = self.site, dist.get_rank()
        listed = [[s.number, s.names, s.owners] for s in self.shares]
        extra = json.dumps([settings, site.layout.anchor, site.layout.constrain_full, listed])
        common: dict[str, Any] = {
            "replica": site.index,
            "roster": range(len(site.layout.replicas)),
            "basis_version": self.stage.boundary.basis.version if site.layout.ratio else 0,
            "extra": hashlib.sha256(extra.encode()).digest(),
            "device": device,
        }
        start, site.initial = site.initial, {}
        parts = [
            Partition({n: start[n] for n in s.names}, self.options, stage=s.number, **common)
            for s in self.shares
            if rank in s.owners
        ]
        rows = next((s for s in self.shares if self.embedding in s.names), None)
        follower = None
        if self.site.embedding_rows is not None and rows is not None:
            table = {self.embedding: self.site.embedding_rows}
            follower = Follower(Partition(table, self.options, stage=rows.number, **common))
        groups = site.exchange_groups(self.shares)
        transport = GroupTransport(
            groups,
            replicas=range(len(site.layout.replicas)),
            vote_group=site.world,
        )
        feeds = (
            site.replica.role == "compressed" and site.replica.num_stages > 1 and site.stage == 0
        )
        current = MixedRound(
            parts,
            transport,
            inner=site.inner,
            embedding=-1 if rows is None else rows.number,
            follower=follower,
            feeds=feeds,
            ledger=ledger,
        )
        if ledger is not None:
            ledger.expect("outer", num_ranks=len(site.layout.replicas))
            for record in (r for p in parts for r in p.table.records if not r.sparse):
                reason = "small or one-dimensional: sent dense"
                ledger.declare_exempt("outer", record.name, reason, record.nbytes)
        return _MixedCore(current, site)

    def _constrain_full(self, module: nn.Module) -> Constraint:
        """Hold a full replica to what compressed ones are held to."""
        basis = self.stage.boundary.basis
        params = dict(module.named_parameters())
        writes = {n: params[n] for n in params if n in self.confined}
        rows = {}
        if self.embedding in params:
            self._own_tables = FixedRows.of(basis, params[self.embedding])
            rows[self.embedding] = (params[self.embedding], self._own_tables.tokens)
        return Constraint(basis, writes, rows)

    def step(self) -> None:
        """Count an inner step; project weights first, where no optimizer is followed."""
        if self.constraint is not None and self._attached is None:
            self.constraint.project()
        super().step()

    def project_gradients(self) -> None:
        """Project this rank's gradients; call it after backward, before the norm is taken."""
        if self.constraint is not None:
            self.constraint.project_gradients()

    def _sync(self, abstain: str) -> Outcome:
        theta = self._core.theta
        constraint = self.constraint if self.site.layout.anchor == "projected" else None

        def delta(name: str) -> Tensor:
            return pseudo_gradient(name, theta[name], self.inner.whole(name), constraint)

        return self._core.sync(delta, self.tokens or self.progress, abstain)

    def end_round(self, *, abstain: str = "") -> Outcome:
        """Agree with the other replicas now, then split and project anew (see `OuterLoop`)."""
        outcome = super().end_round(abstain=abstain)
        if outcome.committed or outcome.own.startswith("abstained"):
            self._place_again()
        return outcome

    def _place_again(self) -> None:
        """Split the shared embedding and project what this rank writes."""
        self._split()
        if self.constraint is not None:
            self.constraint.project()

    def _split(self) -> None:
        self.stage.round = self._core.parts[0].round
        rows = self._core.rows(self.embedding)
        if rows is not None:
            if self.stage.tables is not None:
                self.stage.tables.resplit(self.stage.boundary.basis, rows)
            if self._own_tables is not None:
                self._own_tables.resplit(self.stage.boundary.basis, rows)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue from `state_dict`, of this rank or of all ranks of its replica.

        Raises:
            CheckpointError: of other tensors, partitions or settings.
        """
        super().load_state_dict(state)
        self._split()

    @contextmanager
    def shared_weights(self, mode: str = "full") -> Iterator[None]:
        """Hold the shared weights in the parameters inside the block, as for evaluation.

        Args:
            mode: "full": theta as it is; "projected" and "boundaries": output matrices that a
                compressed replica projects are projected (the caller evaluates through boundaries
                or not).
        """
        with super().shared_weights():
            if mode != "full":
                writes = {n: p for n, p in self.inner.params.items() if n in self.confined}
                Constraint(self.stage.boundary.basis, writes).project()
            yield

    def fingerprints(self) -> dict[int, list[str]]:
        """Return each partition's SHA-256 on every rank that holds it; collective.

        Raises:
            ContractError: on all ranks: two of them differ.
        """
        found: dict[int, list[str]] = {}
        for rank in _gather({p.stage: fingerprint(p.theta).hex() for p in self._core.all_parts()}):
            for number, digest in rank.items():
                found.setdefault(number, []).append(digest)
        for number, digests in found.items():
            if len(set(digests)) > 1:
                raise ContractError(
                    f"shared weights of partition {number} differ between its holders: start all "
                    "replicas from the same seed or checkpoint"
                )
        return found

    def gather_figures(self) -> list[dict[str, Any]]:
        """Return the last round's figures of every rank, by world rank; collective.

        Each has replica, stage, role, whether its message was in the mean, the norm of its
        residual, and the bytes it sent and received.
        """
        last = self.last
        square = sum(e.double().square().sum().item() for p in self._core.parts
                     for e in p.residual.values())  # fmt: skip
        own = torch.tensor(
            [
                float(last is not None and last.own == "sent"),
                square**0.5,
                0.0 if last is None else float(last.sent_bytes),
                0.0 if last is None else float(last.received_bytes),
            ],
            dtype=torch.float64,
            device=self.site.device,
        )
        rows = comm.all_gather(own, None, group=self.site.world, link="scalars", ledger=self.ledger)
        figures = []
        for rank, (sent, norm, out, into) in enumerate(rows.view(-1, 4).tolist()):
            replica, stage = self.site.layout.place(rank)
            figures.append(
                {
                    "replica": replica,
                    "stage": stage,
                    "role": self.site.layout.replicas[replica].role,
                    "in_mean": bool(sent),
                    "residual_norm": norm,
                    "sent_bytes": int(out),
                    "received_bytes": int(into),
                }
            )
        return figures

    def detach(self) -> None:
        """Stop following and projecting."""
        super().detach()
        if self._attached is not None:
            self._attached.remove()


class _MixedCore:
    """The shared weights of this rank's partitions (see `thinwire.sparseloco.outer.Core`)."""

    def __init__(self, current: MixedRound, site: Site) -> None:
        self.current, self.site = current, site

    @property
    def parts(self) -> list[Partition]:
        return self.current.parts

    def all_parts(self) -> list[Partition]:
        follower = self.current.follower
        return self.parts + ([follower.part] if follower is not None else [])

    @property
    def theta(self) -> dict[str, Tensor]:
        return {name: x for part in self.parts for name, x in part.theta.items()}

    def rows(self, embedding: str) -> Tensor | None:
        """Return the shared embedding rows, if this rank holds them."""
        for part in self.all_parts():
            if embedding in part.theta:
                return part.theta[embedding]
        return None

    def sync(self, delta: Delta, tokens: int, abstain: str) -> Outcome:
        return self.current.run(delta, tokens, abstain)

    def due(self, elapsed_s: float) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        follower = self.current.follower
        state = {f"partition{part.stage}": part.state_dict() for part in self.parts}
        if follower is not None:
            state[f"follower{self.site.stage}"] = follower.part.state_dict()
        return state

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from this rank's state, or from those of all ranks of this replica."""
        saved = [part for state in states for part in state.values()]
        owned = [p for state in states for k, p in state.items() if k.startswith("partition")]
        for part in self.parts:
            own = [s for s in owned if (s["replica"], s["stage"]) == (part.replica, part.stage)]
            if not own:
                raise CheckpointError(
                    f"the state holds nothing of replica {part.replica}, partition {part.stage}"
                )
            load_partition(part, own[:1])
        follower = self.current.follower
        if follower is not None:
            rows = [s for s in saved if s["stage"] == follower.part.stage]
            if not rows:
                raise CheckpointError("the state holds no embedding rows for a later stage")
            row = dict(rows[0])
            row["replica"] = follower.part.replica
            load_partition(follower.part, [row])


def _confined(stage: Stage, site: Site) -> list[str]:
    """Return the matrices that this stage keeps in the subspace, or would in constrained mode."""
    behind_last = site.replica.num_stages > 1 and stage.after == "none"
    if site.replica.role == "full" or behind_last:
        return []
    return list(find_writes(stage.module, stage.boundary.basis.dim))


def _same_settings(found: list[str]) -> str:
    different = sorted({text for text in found if text})
    if len(different) > 1:
        raise ConfigError(
            f"compressed replicas differ in boundary mode, basis, rank or vocabulary: {different}"
        )
    return different[0] if different else ""


def _boundary_settings(stage: Stage, site: Site) -> str:
    """Return what compressed replicas must agree on, "" for the others."""
    b = stage.boundary
    if site.replica.role == "full" or b.tables is None:
        return ""
    return f"{b.mode} {b.basis.digest.hex()} {b.basis.rank} {b.vocab_size}"


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
