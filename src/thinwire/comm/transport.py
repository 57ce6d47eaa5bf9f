"""The bytes that leave this rank: every codec message of thinwire passes through these functions.

Tests replace them to see what travels (`thinwire.testing.transport`).

Legend: `R` ranks of the group, `W` bytes of one message.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.comm.ledger import Ledger

__all__ = [
    "all_gather",
    "all_to_all",
    "dense_reduce_scatter",
    "recv",
    "send",
    "start_all_to_all",
    "wait",
]


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


def start_all_to_all(messages: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    """Do as `all_to_all`, but return at once, with the work to wait for."""
    received = torch.empty_like(messages)
    work = dist.all_to_all_single(received.view(-1), messages.view(-1), group=group, async_op=True)
    return received, work


def dense_reduce_scatter(
    output: Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce x [R*N] over the group, uncompressed; leave this rank's part in output [N].

    gloo's own reduce-scatter is an all-reduce inside, which sends twice the bytes. There the rows
    are exchanged by all-to-all and added in rank order, in fp32 or better.
    """
    direct = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    if dist.get_backend(group) != "gloo" or x.device.type != "cpu" or not direct:
        _compat.reduce_scatter_single(output, x, op=op, group=group)
        return
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    rows = received.view(group.size(), -1)
    total = rows[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    if op == dist.ReduceOp.AVG:
        total /= group.size()
    output.copy_(total)


def wait(work: dist.Work | None, books: Ledger | None, link: str) -> None:
    """Wait for a message, booking the seconds."""
    if work is None:
        return
    with nullcontext() if books is None else books.timed(link, "wait_s"):
        work.wait()


def send(message: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Send uint8 [W] to the group rank `peer`."""
    dist.send(message, group=group, group_dst=peer)


def recv(nbytes: int, peer: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Receive uint8 [nbytes] from the group rank `peer`."""
    message = torch.empty(nbytes, dtype=torch.uint8, device=device)
    dist.recv(message, group=group, group_src=peer)
    return message


def broadcast(
    message: Tensor, source: int, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Send uint8 [W] from the group rank `source` to all, in place; return the work, if async."""
    return dist.broadcast(message, group=group, group_src=source, async_op=async_op)
