"""The process of one local rank: `launch` starts `python -m thinwire.train.worker DIR RANK`."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import CheckpointError, ConfigError, DataError, ThinwireError
from thinwire.train.config import Compute, Config
from thinwire.train.loop import train
from thinwire.train.parse import from_dict
from thinwire.train.process import local_device, pick_device, process_group

__all__ = ["exit_status", "run_under_torchrun", "train_job"]


def exit_status(error: BaseException) -> int:
    """Return 2 for what a user can set right, 1 for a run that failed, an error's own if it has."""
    by_kind = 2 if isinstance(error, ConfigError | DataError | CheckpointError) else 1
    return int(getattr(error, "status", by_kind))


def train_job(payload: dict[str, Any]) -> dict[str, Any]:
    """Run the training that the command line asked for; return run.json's content on rank 0."""
    config = from_dict(payload["config"])
    resume = Path(payload["resume"]) if payload["resume"] else None
    device = local_device(config)
    run = train(config, resume=resume, device=device, progress=payload["progress"])
    return run if dist.get_rank() == 0 else {}


def run_under_torchrun(
    payload: dict[str, Any], job: Callable[[dict[str, Any]], dict[str, Any]] = train_job
) -> dict[str, Any]:
    """Do the job as the rank that torchrun's variables name; return its result.

    Args:
        payload: for the job; its `config` says device and threads.
        job: what runs inside the world's group.

    Raises:
        ThinwireError: as the job.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    config = from_dict(payload["config"])
    device = pick_device(config, local_rank, local_ranks)
    try:
        with process_group(
            device, rank=rank, world_size=world_size, store=None, threads=config.compute.threads
        ):
            return job(payload)
    except ThinwireError as error:
        # Ranks fail alike in most cases: rank 0 speaks for all, another only with its number.
        who = "thinwire" if rank == 0 else f"thinwire rank {rank}"
        print(f"{who}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(exit_status(error))


def main() -> None:
    """Join the group, run the target, leave result or error in the job's folder."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    try:
        _run(folder, rank)
    except BaseException as error:  # noqa: BLE001  whatever it was, the parent must learn of it
        for_people = isinstance(error, ThinwireError)
        message = " ".join(str(error).split()) if for_people else traceback.format_exc()
        report = {"for_people": for_people, "message": message, "status": exit_status(error)}
        _write(folder / f"error-{rank}.json", report)
        # Peers may be gone: no tear-down of the group, no interpreter exit that could hang in it.
        sys.stdout.flush()
        os._exit(exit_status(error))


def _run(folder: Path, rank: int) -> None:
    job = json.loads((folder / "job.json").read_text())
    payload = job["payload"]
    config = replace(
        Config(),
        compute=Compute(device=payload.get("device", "cpu"), threads=payload.get("threads", 0)),
    )
    device = pick_device(config, rank, job["nproc"])
    module, function = job["target"].split(":")
    target = getattr(importlib.import_module(module), function)
    with process_group(
        device,
        rank=rank,
        world_size=job["nproc"],
        store=folder / "store",
        threads=config.compute.threads,
    ):
        result = target(payload)
        _write(folder / f"result-{rank}.json", result)


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
