"""Ranks as threads of one process: a collective test in milliseconds instead of seconds."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

__all__ = ["run_ranks"]

T = TypeVar("T")

POLL_S = 0.05
_Mail = defaultdict[tuple[str, int, int, int], "queue.SimpleQueue[torch.Tensor]"]


class _Sent(dist.Work):
    """A send: its message lies in the receiver's mail already."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Received(dist.Work):
    """A receive that looks for its message when it is waited for, so that it blocks no send."""

    def __init__(self, tensor: torch.Tensor, box: "queue.SimpleQueue[torch.Tensor]") -> None:
        super().__init__()
        self._tensor, self._box, self._done = tensor, box, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self._done:
            if ProcessLocalGroup._terminate.is_set():
                raise SystemExit("another rank failed")
            try:
                message = self._box.get(timeout=POLL_S)
            except queue.Empty:
                continue
            self._tensor.detach().view(-1).copy_(message)
            self._done = True
        return True


@contextmanager
def _point_to_point() -> Iterator[None]:
    """Give torch's threaded groups send and receive, in the order of each pair of ranks."""
    mail: _Mail = defaultdict(queue.SimpleQueue)
    lock = threading.Lock()

    def box(group: Any, source: int, target: int, tag: int) -> "queue.SimpleQueue[torch.Tensor]":
        with lock:
            return mail[group.pg_name, source, target, tag]

    def send(group: Any, tensors: list[torch.Tensor], target: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        box(group, group.rank(), target, tag).put(tensor.detach().reshape(-1).clone())
        return _Sent()

    def recv(group: Any, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return _Received(tensor, box(group, source, group.rank(), tag))

    with mock.patch.multiple(ProcessLocalGroup, create=True, send=send, recv=recv):
        yield


def run_ranks(num_ranks: int, fn: Callable[[int], T], *, timeout_s: float = 120.0) -> list[T]:
    """Run `fn(rank)` on `num_ranks` threads with a default process group; return its results.

    Collectives, sends and receives exchange tensors in memory. A wait has no timeout of its own:
    `timeout_s` ends the test.

    Args:
        num_ranks: world size.
        fn: called with its rank, inside an initialized default group.
        timeout_s: seconds after which a test that hangs fails.

    Raises:
        The first exception of any rank, or TimeoutError naming the ranks that did not end.
    """
    results: list[T | None] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    _install_threaded_pg()
    ProcessLocalGroup.reset()
    store = HashStore()

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001  a rank's failure must end the others
            errors.append((rank, error))
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(num_ranks)]
    try:
        with _point_to_point():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout_s)
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    finally:
        _uninstall_threaded_pg()
        isolate(False)
    if errors:
        raise errors[0][1]
    if stuck:
        raise TimeoutError(f"ranks {stuck} did not end within {timeout_s} s")
    return results  # type: ignore[return-value]
