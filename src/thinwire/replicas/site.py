"""Where this rank stands, its process groups, and its stage wrapped as its replica's role asks.

Every rank makes every group, in the same order. Steps, collective over the world:
1. `Site(layout)`: one group per replica of several stages.
2. `Site.basis(...)`: the subspace, agreed by all.
3. `Site.wrap(module, basis)`: stages of one replica agree on their boundaries; the first stage of a
   compressed replica sends its embedding rows to the others, which follow them from then on.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm import Ledger, transport
from thinwire.errors import ConfigError
from thinwire.pipeline import Basis, FixedRows, Link, Stage
from thinwire.replicas.layout import Layout, Replica
from thinwire.replicas.ownership import Share

__all__ = ["Site"]


class Site:
    """This rank's place in a layout.

    Args:
        layout: of all replicas; its ranks are the world's.
        device: where messages lie.
        timeout_s: seconds after which a lost peer ends a wait with an error.
        ledger: books everything sent.

    Attributes:
        index: of this rank's replica.
        stage: of this rank within it.
        inner: the replica's ranks, None for one.
        world: all ranks.
        link: boundaries of this rank's replica, from `wrap`.
        embedding_rows: on later stages of compressed replicas, the rows they follow.
        initial: weights before `wrap` projected them: where the shared weights start.

    Raises:
        ConfigError: the layout has another number of ranks than the world.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
        ledger: Ledger | None = None,
    ) -> None:
        if layout.num_ranks != dist.get_world_size():
            raise ConfigError(
                f"the layout has {layout.num_ranks} ranks, {dist.get_world_size()} run: name every "
                "rank in a replica, or change --nproc"
            )
        self.layout, self.ledger, self.timeout = layout, ledger, timedelta(seconds=timeout_s)
        self.device = torch.device(device)
        self.index, self.stage = layout.place(dist.get_rank())
        self.inner: dist.ProcessGroup | None = None
        for index, replica in enumerate(layout.replicas):
            if replica.num_stages > 1:
                group = dist.new_group(list(replica.ranks), timeout=self.timeout)
                if index == self.index:
                    self.inner = group
        self.world = dist.new_group(timeout=self.timeout)
        self.embedding_rows: Tensor | None = None
        self.initial: dict[str, Tensor] = {}
        self.link: Link | None = None

    @property
    def replica(self) -> Replica:
        """Return this rank's replica."""
        return self.layout.replicas[self.index]

    def basis(self, dim: int, seed: int = 0, kind: str = "random") -> Basis:
        """Return the subspace of the compressed replicas; collective over the world.

        Args:
            dim: width of the residual stream.
            seed: of a random basis.
            kind: "random" or "coord".
        """
        if not self.layout.ratio:
            return Basis(dim, 1, kind="coord")  # tells the width; nothing is projected
        basis = Basis(dim, Basis.rank_of(dim, self.layout.ratio), seed, kind)
        basis.agree(self.world, device=self.device, ledger=self.ledger)
        return basis

    def wrap(
        self,
        module: nn.Module,
        basis: Basis,
        *,
        wire: str = "bf16",
        ids: str = "send",
        embedding: str = "embed.weight",
        activations: torch.dtype = torch.float32,
    ) -> Stage:
        """Return this rank's stage; collective over its replica.

        Args:
            module: the whole model, or this rank's stage of it.
            basis: from `basis`.
            wire: dtype or codec name of the coefficients.
            ids: "send" or "local".
            embedding: name of the embedding rows within the first stage.
            activations: dtype of activations between stages.

        Raises:
            ConfigError: see `Link.wrap`.
        """
        compressed = self.replica.role == "compressed"
        params = dict(module.named_parameters())
        mode = self.layout.mode if compressed else "none"
        link = Link(
            basis,
            num_stages=self.replica.num_stages,
            mode=mode,
            wire=wire,
            ids=ids,
            activations=activations,
            group=self.inner,
            device=self.device,
            ledger=self.ledger,
        )
        if compressed:
            rows = self._share_rows(params.get(embedding))
            link.tables = FixedRows.of(link.basis, rows)
            if self.stage > 0:
                self.embedding_rows = rows
        self.link = link
        self.initial = {n: p.detach().clone() for n, p in params.items() if p.requires_grad}
        return link.wrap(module, self.stage, embedding=embedding)

    def _share_rows(self, rows: Tensor | None) -> Tensor:
        """Return the embedding [V, D] in fp32 on every stage; booked as exempt."""
        if self.stage == 0 and rows is None:
            raise ConfigError("the first stage has no embedding rows: name them with embedding=")
        if self.inner is None:
            assert rows is not None
            return rows.detach().float()
        shape = torch.tensor([0, 0] if rows is None else list(rows.shape), device=self.device)
        transport.broadcast(shape, 0, self.inner)
        if rows is None:
            full = torch.empty(*shape.tolist(), device=self.device)
        else:
            full = rows.detach().float().to(self.device).clone()
        transport.broadcast(full.view(-1).view(torch.uint8), 0, self.inner)
        if self.ledger is not None and self.stage == 0:
            nbytes = (full.nbytes + shape.nbytes) * (self.inner.size() - 1)
            self.ledger.book(
                "pipeline",
                dense_bytes=nbytes,
                wire_bytes=nbytes,
                exempt_bytes=nbytes,
                reason="embedding rows, sent to the stages at set-up",
            )
        return full

    def exchange_groups(self, shares: list[Share]) -> dict[int, dist.ProcessGroup]:
        """Return the group of each partition that this rank owns; every rank calls it."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        groups: dict[int, dist.ProcessGroup] = {}
        for share in shares:
            if share.owners not in made:
                made[share.owners] = dist.new_group(list(share.owners), timeout=self.timeout)
            if dist.get_rank() in share.owners:
                groups[share.number] = made[share.owners]
        return groups
