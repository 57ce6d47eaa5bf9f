"""`SparseLoCo`: the outer loop whose replicas exchange sparse messages."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm import Ledger
from thinwire.errors import ConfigError
from thinwire.sparseloco.options import Options
from thinwire.sparseloco.outer import OuterLoop
from thinwire.sparseloco.partition import Delta, Partition
from thinwire.sparseloco.rounds import Outcome, Transport, book_hashes, run_round
from thinwire.sparseloco.saved import load_partition
from thinwire.sparseloco.store import StoreTransport
from thinwire.sparseloco.transport import GroupTransport

__all__ = ["SparseLoCo"]


class SparseLoCo(OuterLoop):
    """Train replicas apart for `sync_every` steps, then exchange 1-3 % of what changed, in 2 bits.

    With theta the shared weights, e a replica's residual, D what its message says:

        a = beta*e + (theta - local weights)
        D = 2-bit values of the k largest |a| of every 4096;  e = a - D
        theta = theta - alpha * mean of the replicas' D;  local weights = theta

    The residual takes the place of an outer momentum. All replicas end a round with the same bits.
    Theta and e are fp32 whatever the parameters' dtype (with 16-bit parameters, the change is
    measured from the rounded theta that training started from). Weights stored by `thinwire.eco`
    are rounded to nearest at the end of a round, alike on all replicas; theta keeps their fp32.

    Args:
        model: a plain module (no DDP), one sharded by FSDP2 or split by tensor parallelism, or
            names and parameters. Names must agree between replicas, layouts need not. It holds the
            weights that training starts from (load them first).
        inner_optimizer: any optimizer over these parameters; its `step` is followed. Clip before
            it, decay inside it. None: call `step()` of this object after each step yourself.
        sync_every: inner steps of a round.
        options: codec and mean, see `Options`; None for the defaults.
        group: one rank (the leader) of every replica; None is the world.
        inner_group: all ranks of this replica; None: one rank, or the one mesh axis that the
            parameters lie on. Its rank 0 leads.
        transport: in place of `group`, such as a `StoreTransport`.
        join: enter a run that is under way (needs a transport that can): take the shared weights
            from its replicas at their next round boundary, with an empty residual, and abstain from
            the first round. Give the inner optimizer some 30 warm-up steps.
        ledger: books every byte on link "outer".
        device: where theta and residuals live, "cpu" say; None: beside the parameters.

    Raises:
        ConfigError: settings that don't fit, or nothing to compress.
        ContractError: replicas start from different weights; on all of them.

    Example:
        >>> outer = SparseLoCo(model, optimizer, sync_every=30, group=sites, ledger=ledger)
        >>> loss(model(x)).backward(); optimizer.step(); optimizer.zero_grad()  # as ever

    Reference: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv
        2508.15706; the algorithm in full: "Covenant-72B", arXiv 2603.08163.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        inner_optimizer: Optimizer | None,
        *,
        sync_every: int = 30,
        options: Options | None = None,
        group: dist.ProcessGroup | None = None,
        inner_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        join: bool = False,
        ledger: Ledger | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            model, inner_optimizer, sync_every=sync_every, inner_group=inner_group, ledger=ledger
        )
        whole = self.initial()
        where = None if device is None else torch.device(device)
        self.options = options or Options()

        def build() -> bool:
            link = transport or _group_transport(group, self.inner.size)
            self.core = _SparseCore(whole, self.options, link, ledger, where)
            return self.core.join() if join else self.core.start()

        self._watches_clock = self.inner.lead(build)
        if join:
            self.inner.place(None if self.core is None else self.core.theta)
        self._joined = join

    def end_round(self, *, abstain: str = "") -> Outcome:
        """Agree with the other replicas now; collective (see `OuterLoop.end_round`)."""
        outcome = super().end_round(abstain=abstain or ("just joined" if self._joined else ""))
        self._joined = False
        return outcome

    @property
    def partition(self) -> Partition:
        """Return the replica's state.

        Raises:
            ConfigError: this rank is not its replica's leader.
        """
        if not isinstance(self.core, _SparseCore):
            raise ConfigError("the replica's leader alone holds its state")
        return self.core.part


def _group_transport(group: dist.ProcessGroup | None, inner_size: int) -> GroupTransport:
    if group is None and inner_size > 1:
        raise ConfigError("with several ranks per replica, pass group: one rank of each replica")
    return GroupTransport(group)


class _SparseCore:
    """One partition, its transport, the ledger."""

    def __init__(
        self,
        whole: dict[str, Tensor],
        options: Options,
        transport: Transport,
        ledger: Ledger | None,
        device: torch.device | None,
    ) -> None:
        self.part = Partition(
            whole,
            options,
            replica=transport.replica,
            roster=transport.replicas,
            device=device,
        )
        self.transport, self.ledger = transport, ledger
        if ledger is not None:
            _declare(self.part, ledger)

    def start(self) -> bool:
        """Check that replicas start alike; return whether rounds have deadlines."""
        book_hashes(self.ledger, len(self.part.roster))
        return self.transport.start(self.part)

    def join(self) -> bool:
        """Enter a run under way; return whether rounds have deadlines."""
        if not isinstance(self.transport, StoreTransport):
            raise ConfigError("join needs a StoreTransport: a process group has fixed members")
        self.transport.join([self.part])
        if self.ledger is not None:
            nbytes = 4 * self.part.table.numel
            reason = "weights of the run that was joined"
            self.ledger.book(
                "outer", dense_bytes=nbytes, wire_bytes=nbytes, exempt_bytes=nbytes, reason=reason
            )
        return self.transport.deadline is not None

    @property
    def theta(self) -> dict[str, Tensor]:
        return self.part.theta

    def sync(self, delta: Delta, tokens: int, abstain: str) -> Outcome:
        return run_round(
            [self.part], [delta], tokens, self.transport, abstain=abstain, ledger=self.ledger
        )

    def due(self, elapsed_s: float) -> bool:
        return self.transport.due(elapsed_s)

    def state_dict(self) -> dict[str, Any]:
        return self.part.state_dict()

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        load_partition(self.part, states)


def _declare(part: Partition, ledger: Ledger) -> None:
    ledger.expect("outer", num_ranks=len(part.roster))
    for record in part.table.records:
        if not record.sparse and record.numel:
            ledger.declare_exempt(
                "outer", record.name, "small or one-dimensional: sent dense", record.nbytes
            )
