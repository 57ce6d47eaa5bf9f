"""Carry a worker's messages over process groups.

Values use the group itself; masks use a second group over the same ranks, so that they never queue
before other collectives; values that overlap backward use a third, driven by one ordered thread.

Legend: `N` ranks, `E` elements of a message.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire import _compat, comm
from thinwire.codecs import Cast
from thinwire.comm import transport
from thinwire.scape.reduce import Books, ValueWire, owners_sent

__all__ = ["Arriving", "Exchange", "OrderedThread", "twin_group"]


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group over the ranks of `group`; ranks outside take no part.

    torch names such a group by its ranks and by how many groups a rank has made, and hangs where
    ranks differ in that: those that have fewer first make groups of their own.
    """
    ranks = dist.get_process_group_ranks(group)
    counts = [0] * len(ranks)
    dist.all_gather_object(counts, _compat.num_groups(), group=group)
    for _ in range(max(counts) - _compat.num_groups()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return dist.new_group(ranks, use_local_synchronization=True)


@dataclass
class Arriving:
    """Owners' messages on their way.

    Attributes:
        lengths: bytes per rank, 0 for a rank that sends nothing.
        buffers: where they arrive.
        works: what to wait for.
        launched_s: when they left.
        held: buffers that must live until the works are done.
    """

    lengths: Sequence[int]
    buffers: list[Tensor]
    works: list[Any]
    launched_s: float = field(default_factory=time.perf_counter)
    held: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor | None]:
        """Return the messages by rank, None where nothing was sent."""
        for work in self.works:
            if work is not None:
                work.wait()
        return [b[:n] if n else None for b, n in zip(self.buffers, self.lengths, strict=True)]


class Exchange:
    """The collectives of one optimizer.

    Args:
        group: the workers; None for a single worker without a group.
        shard_group: ranks that hold one replica together; None if each rank holds all of it.
        wire: how values travel.
        ordered: rank-order sums, or torch's own.
        books: where bytes are booked.
        threaded: also make the group and thread for values that overlap backward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
        wire: ValueWire,
        *,
        ordered: bool,
        books: Books,
        threaded: bool = False,
    ) -> None:
        self.group, self.shard_group, self.wire = group, shard_group, wire
        self.ordered, self.books = ordered, books
        self.num_ranks = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        alone = group is None or self.num_ranks == 1
        self.mask_group = None if alone else twin_group(group)  # type: ignore[arg-type]
        self.early_group = None if alone or not threaded else twin_group(group)  # type: ignore[arg-type]
        self.thread = OrderedThread() if threaded else None

    def mean(self, x: Tensor, *, early: bool = False) -> Tensor:
        """Return the mean [E] over workers, bit-equal on all; collective."""
        group = self.early_group if early else self.group
        if group is None or self.num_ranks == 1:
            return self.wire.mean([x])
        if not self.ordered:
            total = comm.all_reduce(x.to(self.wire.dtype), None, group=group)
            return total.to(x.dtype) / self.num_ranks
        total = comm.all_reduce(x, self.wire.codec, group=group, nonfinite="propagate")
        return total / self.num_ranks

    def launch(
        self, message: Tensor | None, lengths: Sequence[int], device: torch.device, link: str
    ) -> Arriving:
        """Send this rank's message to all and receive theirs, asynchronously.

        Args:
            message: uint8 of `lengths[rank]` bytes, None if that is 0.
            lengths: bytes of every rank's message.
            device: where messages lie.
            link: "masks" or "weights".
        """
        self.books.owners(link, lengths, dense=link == "weights")
        if self.mask_group is None or not sum(lengths):
            return Arriving(lengths, [_buffer(message, lengths[0], device)], [])
        padded, _ = owners_sent(lengths)
        if padded:
            mine = _buffer(message, max(lengths), device)
            received, work = transport.all_gather(mine, self.mask_group, async_op=True)
            return Arriving(lengths, list(received.unbind(0)), [work], held=[mine])
        buffers = [torch.empty(n, dtype=torch.uint8, device=device) for n in lengths]
        if message is not None:
            buffers[self.rank] = message
        works = [
            transport.broadcast(buffers[owner], owner, self.mask_group, async_op=True)
            for owner, n in enumerate(lengths)
            if n
        ]
        return Arriving(lengths, buffers, works)

    def lengths(self, nbytes: int, device: torch.device) -> list[int]:
        """Return every rank's message length, where it depends on data; collective."""
        if self.mask_group is None:
            return [nbytes]
        mine = torch.tensor([nbytes], dtype=torch.int32, device=device).view(torch.uint8)
        received, _ = transport.all_gather(mine, self.mask_group)
        self.books.owners("masks", [4] * self.num_ranks, dense=False)
        return received.view(torch.int32).view(-1).tolist()

    def sum_over_workers(self, x: Tensor) -> Tensor:
        """Return the sum of a few float64 numbers over the workers, in rank order."""
        return self._sum(x, self.group)

    def sum_over_shards(self, x: Tensor) -> Tensor:
        """Return the sum of a few float64 numbers over the ranks of one replica."""
        return self._sum(x, self.shard_group)

    def _sum(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if group is None or group.size() == 1:
            return x
        self.books.scalars(x.nbytes, group.size())
        return comm.all_reduce(x, Cast(), group=group, nonfinite="propagate")

    def close(self) -> None:
        """End the thread."""
        if self.thread is not None:
            self.thread.close()


class OrderedThread:
    """One thread that runs jobs in the order of submission, the same on every rank.

    Collectives of several phases that are chained on futures deadlock, because futures complete in
    an order that differs between ranks.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, job: Callable[[], Any], device: torch.device) -> "Future[Any]":
        """Run `job` after those before it; what it reads must be ready on the current stream."""
        devices = [device] if device.type == "cuda" else []
        future: Future[Any] = Future(devices=devices)  # type: ignore[arg-type]
        ready = torch.cuda.current_stream(device).record_event() if devices else None

        def run() -> None:
            try:
                if ready is not None:
                    torch.cuda.set_device(device)
                    torch.cuda.current_stream(device).wait_event(ready)
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001  it must reach whoever waits
                future.set_exception(error)

        if self._thread is None:
            self._thread = Thread(target=self._work, name="thinwire-values", daemon=True)
            self._thread.start()
        self._jobs.put(run)
        return future

    def close(self) -> None:
        """Finish the jobs and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _buffer(message: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    """Return the message padded with zeros to `nbytes`."""
    if message is not None and message.numel() == nbytes:
        return message
    out = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if message is not None:
        out[: message.numel()] = message
    return out
