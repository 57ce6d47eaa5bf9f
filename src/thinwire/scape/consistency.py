"""Checks that workers hold what they should hold alike: table, weights, moments, masks.

Legend: `N` workers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ContractError
from thinwire.scape.exchange import Exchange
from thinwire.scape.layout import Entry, local
from thinwire.scape.table import Table

if TYPE_CHECKING:
    from thinwire.scape.engine import SparseOptimizer

__all__ = ["fingerprint", "same_replicas", "same_table", "same_weights"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return a hash of the tensors' bits, int64 [2]: a sum, and a sum weighted by position."""
    first = tensors[0]
    total = torch.zeros(2, dtype=torch.int64, device=first.device)
    for x in tensors:
        if x.numel() == 0:
            continue
        for part in x.detach().reshape(-1).view(_INTEGERS[x.itemsize]).split(_CHUNK):
            bits = part.long()
            weights = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
            total = total * 31 + torch.stack((bits.sum(), (bits * weights).sum())).to(total.device)
    return total


def same_table(exchange: Exchange, table: Table) -> None:
    """Raise on every rank if a rank was given other parameters; collective.

    Raises:
        ContractError: names and sizes differ between ranks.
    """
    if exchange.group is None:
        return
    digests: list[bytes] = [b""] * exchange.num_ranks
    dist.all_gather_object(digests, table.digest, group=exchange.group)
    others = [rank for rank, d in enumerate(digests) if d != digests[0]]
    if others:
        raise ContractError(
            f"ranks {others} of the group were given other parameters than rank 0: names, sizes "
            "and order must agree on all of them"
        )


def same_weights(exchange: Exchange, entries: Sequence[Entry], initial: str) -> None:
    """Check that all workers start from the same weights, or make them; collective.

    Raises:
        ContractError: they differ (initial="check").
    """
    if exchange.group is None or exchange.num_ranks == 1:
        return
    weights = [local(e.param.detach()) for e in entries]
    if initial == "broadcast":
        for w in weights:
            whole = w.contiguous()
            dist.broadcast(whole, group=exchange.group, group_src=0)
            w.copy_(whole)
        return
    others = _differ(exchange, fingerprint(weights))
    if others:
        raise ContractError(
            f"ranks {others} of the group start from other weights than rank 0: seed the model "
            "alike on all ranks, load the same checkpoint, or pass initial='broadcast'"
        )


def same_replicas(optimizer: "SparseOptimizer") -> None:
    """Raise on every rank if weights, shared state or masks differ between workers; collective.

    Raises:
        ContractError: replicas drifted.
    """
    exchange, worker = optimizer.exchange, optimizer.worker
    if exchange.group is None or exchange.num_ranks == 1:
        return
    held = [local(e.param.detach()) for e in optimizer.entries]
    for run in worker.runs:
        held += [run.state[name] for name in worker.rule.shared]
        held += [] if run.index is None else [run.index]
    others = _differ(exchange, fingerprint(held))
    if others:
        raise ContractError(
            f"replicas drifted by step {worker.step}: ranks {others} of the group hold other "
            "weights, moments or masks than rank 0. Something outside the optimizer changed a "
            "parameter on some ranks only, or ranks run different kernels"
        )


def _differ(exchange: Exchange, mine: Tensor) -> list[int]:
    hashes = [torch.empty_like(mine) for _ in range(exchange.num_ranks)]
    dist.all_gather(hashes, mine, group=exchange.group)
    exchange.books.scalars(mine.nbytes * exchange.num_ranks // 2, exchange.num_ranks)
    return [rank for rank, h in enumerate(hashes) if not torch.equal(h, hashes[0])]
