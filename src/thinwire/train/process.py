"""One rank's process: join the group, train, leave it in an order that gloo survives."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.train.config import Config

__all__ = ["local_device", "pick_device", "process_group"]


def pick_device(config: Config, local_rank: int, local_ranks: int) -> torch.device:
    """Return this rank's device.

    Raises:
        ConfigError: CUDA asked for, and fewer devices than local ranks.
    """
    wanted, count = config.compute.device, torch.cuda.device_count()
    if wanted == "cuda" and count < local_ranks:
        raise ConfigError(
            f"compute.device cuda needs a device per rank: {local_ranks} ranks, {count} devices"
        )
    if wanted == "cpu" or count < local_ranks:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def local_device(config: Config) -> torch.device:
    """Return this rank's device inside the world's group, by torchrun's variables if it runs.

    Raises:
        ConfigError: see `pick_device`.
    """
    ranks = dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    return pick_device(config, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


@contextmanager
def process_group(
    device: torch.device, *, rank: int, world_size: int, store: Path | None, threads: int = 0
) -> Iterator[None]:
    """Join the world's group and leave it again.

    Args:
        device: decides the backend: NCCL for CUDA, else gloo.
        rank: this rank.
        world_size: ranks of the world.
        store: file through which local ranks meet; None reads torchrun's variables.
        threads: CPU threads of this rank; 0 shares the machine's cores among its ranks.
    """
    method = f"file://{store.resolve()}" if store else "env://"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads or _threads(world_size))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=method,
        rank=rank,
        world_size=world_size,
    )
    yield
    # A group that reference cycles of FSDP still hold at exit aborts the process: collect first.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


def _threads(world_size: int) -> int:
    """Share this machine's cores among the local ranks."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, (os.cpu_count() or 1) // local_ranks)
