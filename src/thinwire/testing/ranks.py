"""Ranks as threads of one process: a collective test in milliseconds instead of seconds."""

import threading
from collections.abc import Callable
from typing import TypeVar

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


def run_ranks(num_ranks: int, fn: Callable[[int], T], *, timeout_s: float = 120.0) -> list[T]:
    """Run `fn(rank)` on `num_ranks` threads with a default process group; return its results.

    Collectives exchange tensors in memory, send and receive are missing (use real processes).

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
