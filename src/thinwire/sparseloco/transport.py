"""How messages reach the other replicas: through a process group.

Legend: `R` replicas, `W` bytes of a message.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.comm import transport
from thinwire.errors import ConfigError, PeerError
from thinwire.sparseloco.partition import Partition

__all__ = ["GroupTransport", "gather_hashes"]


class GroupTransport:
    """All-gathers over process groups; a lost peer ends the round for all with a PeerError.

    Args:
        group: the owners of the partition, one rank per replica; None is the world. With several
            partitions, a mapping from stage to group (all ranks make all groups in one order).
        replicas: replica ids in group-rank order; None: 0..R-1.
        vote_group: all ranks that own any partition; None: `group`.

    The group's own timeout bounds every wait: create it with the seconds you want
    (`dist.new_group(ranks, timeout=...)`). A gloo or NCCL group is broken once a peer died: the
    partitions stay as they were, and training resumes from them in a new group; for sites that come
    and go, use `StoreTransport`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | dict[int, dist.ProcessGroup] | None = None,
        *,
        replicas: Sequence[int] | None = None,
        vote_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(group, dict) and vote_group is None:
            raise ConfigError("several partitions need vote_group, the ranks of all their owners")
        self._groups = group if isinstance(group, dict) else {}
        first = next(iter(self._groups.values())) if isinstance(group, dict) else group
        self._group = first or _compat.default_group()
        self._vote = vote_group or self._group
        size = self._group.size()
        self.replicas = tuple(range(size) if replicas is None else replicas)
        if len(self.replicas) != size:
            raise ConfigError(f"{len(self.replicas)} replica ids for a group of {size} ranks")
        self._device = torch.device("cpu")

    @property
    def replica(self) -> int:
        """Return the id of this rank's replica."""
        return self.replicas[self._group.rank()]

    def start(self, part: Partition) -> bool:
        """Check that replicas start alike (see `rounds.Transport`); rounds have no deadlines."""
        self._device = part.device
        group = self._groups[part.stage] if self._groups else self._group
        hashes = gather_hashes(part.identity(), group, self._device)
        part.check_same_start(dict(zip(self.replicas, hashes, strict=True)))
        return False

    def due(self, elapsed_s: float) -> bool:
        """Return False: a collective waits for all."""
        return False

    def exchange(self, part: Partition, message: Tensor) -> dict[int, Tensor]:
        """Return every replica's message (see `rounds.Transport`)."""
        group = self._groups[part.stage] if self._groups else self._group
        self._device = message.device
        rows = _gather(message, group, f"the messages of round {part.round}")
        return dict(zip(self.replicas, rows, strict=True))

    def vote(self, note: bytes) -> list[bytes]:
        """Return every rank's note (see `rounds.Transport`)."""
        mine = torch.frombuffer(bytearray(note), dtype=torch.uint8).to(self._device)
        if not self._groups:
            rows = _gather(mine, self._vote, "the votes")
            return [row.cpu().numpy().tobytes() for row in rows]
        # Ranks own different numbers of partitions: lengths first, then notes of one length.
        length = torch.tensor([mine.numel()], device=self._device).view(torch.uint8)
        lengths = _gather(length, self._vote, "the votes").view(torch.int64).view(-1).tolist()
        mine = torch.nn.functional.pad(mine, (0, max(lengths) - mine.numel()))
        rows = _gather(mine, self._vote, "the votes")
        return [row.cpu().numpy().tobytes()[:n] for row, n in zip(rows, lengths, strict=True)]

    def ended(self, parts: Sequence[Partition]) -> None:
        """Do nothing (see `rounds.Transport`)."""


def gather_hashes(digest: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Return every rank's digest, in group-rank order; collective.

    Raises:
        PeerError: a peer was lost.
    """
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    return [row.cpu().numpy().tobytes() for row in _gather(mine, group, "hashes of the weights")]


def _gather(message: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    home = message.device
    if _compat.takes_cuda_only(group):
        message = message.cuda()
    try:
        rows, _ = transport.all_gather(message, group)
    except RuntimeError as error:  # what torch raises for a lost peer and for a timeout
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"a peer was lost while {what} were gathered; weights and residuals are as after "
            f"the last committed round: resume from there ({reason})"
        ) from error
    return rows.to(home)
