"""Real gloo processes for tests that threads cannot stand in for; slow to start, so share them."""

import gc
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import FileStore  # type: ignore[attr-defined]

__all__ = ["run_processes"]


def run_processes(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180.0
) -> list[Any]:
    """Run `fn(rank, *args)` in `num_ranks` processes with a gloo group; return its results.

    Args:
        num_ranks: world size.
        fn: a module-level function; its result must survive torch.save.
        args: picklable arguments.
        timeout_s: seconds after which collectives and the whole launch fail.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
        TimeoutError: naming the ranks that did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        arguments = [(rank, num_ranks, folder, timeout_s, fn, args) for rank in range(num_ranks)]
        ranks = [context.Process(target=_work, args=a, daemon=True) for a in arguments]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_s)
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in stuck:
            ranks[rank].kill()
        for rank in range(num_ranks):
            failure = Path(folder, f"error{rank}")
            if failure.exists():
                raise RuntimeError(f"rank {rank} failed:\n{failure.read_text()}")
        if stuck:
            raise TimeoutError(f"ranks {stuck} did not end within {timeout_s} s")
        files = [Path(folder, f"result{rank}") for rank in range(num_ranks)]
        return [torch.load(f, weights_only=False) for f in files]


def _work(
    rank: int, num_ranks: int, folder: str, timeout_s: float, fn: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )
    try:
        torch.save(fn(rank, *args), f"{folder}/result{rank}")
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        raise
    # A group still referenced by FSDP's cycles at exit aborts the process.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
