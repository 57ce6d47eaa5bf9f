"""The bytes that leave this rank: every codec message of thinwire passes through these functions.

Tests replace them to see what travels (`thinwire.testing.transport`).

Legend: `R` ranks of the group, `W` bytes of one message.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat

__all__ = ["all_gather", "all_to_all", "recv", "send"]


def all_gather(
    message: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Send uint8 [W] to all; return uint8 [R, W] in rank order and the work to wait for."""
    received = message.new_empty(group.size(), message.numel())
    work = _compat.all_gather_single(received.view(-1), message, group=group, async_op=async_op)
    return received, work


def all_to_all(messages: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of uint8 [R, W] to rank r; return the rows received, in rank order."""
    received = torch.empty_like(messages)
    dist.all_to_all_single(received.view(-1), messages.view(-1), group=group)
    return received


def send(message: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Send uint8 [W] to the group rank `peer`."""
    dist.send(message, group=group, group_dst=peer)


def recv(nbytes: int, peer: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Receive uint8 [nbytes] from the group rank `peer`."""
    message = torch.empty(nbytes, dtype=torch.uint8, device=device)
    dist.recv(message, group=group, group_src=peer)
    return message
