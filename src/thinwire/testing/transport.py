"""A double of the transport that remembers what this rank sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.comm import transport

__all__ = ["SentBytes", "record_transport"]


NAMES = ("all_gather", "all_to_all", "start_all_to_all", "broadcast", "send")


@dataclass
class SentBytes:
    """Bytes that left one rank, counted on the buffers themselves.

    Attributes:
        calls: transport calls made.
        nbytes: bytes of buffers addressed to other ranks.
    """

    calls: int = 0
    nbytes: int = 0


@contextmanager
def record_transport() -> Iterator[dict[int, SentBytes]]:
    """Count what each rank (thread) sends while the block runs, keyed by its world rank."""
    sent: dict[int, SentBytes] = {}
    lock = threading.Lock()
    real = {name: getattr(transport, name) for name in NAMES}

    def add(nbytes: int) -> None:
        with lock:
            counter = sent.setdefault(dist.get_rank(), SentBytes())
            counter.calls += 1
            counter.nbytes += nbytes

    def all_gather(message: Tensor, group: dist.ProcessGroup, *, async_op: bool = False):  # type: ignore[no-untyped-def]
        add(message.numel() * message.itemsize * (group.size() - 1))
        return real["all_gather"](message, group, async_op=async_op)

    def add_rows(messages: Tensor, group: dist.ProcessGroup) -> None:
        others = [row for peer, row in enumerate(messages) if peer != group.rank()]
        add(sum(row.numel() * row.itemsize for row in others))

    def all_to_all(messages: Tensor, group: dist.ProcessGroup) -> Tensor:
        add_rows(messages, group)
        return real["all_to_all"](messages, group)

    def start_all_to_all(messages: Tensor, group: dist.ProcessGroup):  # type: ignore[no-untyped-def]
        add_rows(messages, group)
        return real["start_all_to_all"](messages, group)

    def broadcast(message: Tensor, source: int, group: dist.ProcessGroup, **how: bool) -> Any:
        # Booked whole at the source; on average over ranks, what a pipelined broadcast costs each.
        add(message.numel() * (group.size() - 1) if group.rank() == source else 0)
        return real["broadcast"](message, source, group, **how)

    def send(message: Tensor, peer: int, group: dist.ProcessGroup) -> None:
        add(message.numel() * message.itemsize)
        real["send"](message, peer, group)

    doubles = dict(
        zip(NAMES, (all_gather, all_to_all, start_all_to_all, broadcast, send), strict=True)
    )
    for name, double in doubles.items():
        setattr(transport, name, double)
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(transport, name, function)
