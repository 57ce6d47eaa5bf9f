"""Local ranks as processes: start them, wait, show the first cause once, end the others.

No torch here: the parent only watches. Ranks meet through a file in a private folder, so no port
can be taken; each leaves its error, if any, in that folder.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

__all__ = ["Place", "RankFailure", "launch"]

POLL_S = 0.05
# After a failure, others may be about to report the cause (a lost peer is only its consequence).
GRACE_S = 2.0
KILL_S = 5.0


class RankFailure(ThinwireError):
    """A rank ended badly; the message is the cause as it would show in one process.

    Attributes:
        status: exit status for the command line.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Place:
    """Where a rank's process runs.

    Attributes:
        prefix: words put before its command.
        environment: variables set for it.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def launch(
    nproc: int,
    target: str,
    payload: Mapping[str, Any],
    places: Sequence[Place] | None = None,
) -> list[Any]:
    """Run `target(payload)` on `nproc` local ranks, each inside a process group.

    Args:
        nproc: number of ranks.
        target: "module:function"; it gets the payload and returns a JSON value.
        payload: JSON values; `payload["device"]` is "cpu" (default), "cuda" or "auto", and
            `payload["threads"]` the CPU threads per rank (0, the default, shares the cores).
        places: where each rank runs; None: on this machine as it is.

    Returns:
        What each rank returned.

    Raises:
        RankFailure: the first failing rank's error, after all ranks have ended.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-") as name:
        folder = Path(name)
        job = {"target": target, "payload": dict(payload), "nproc": nproc}
        (folder / "job.json").write_text(json.dumps(job))
        where = places or [Place()] * nproc
        ranks = [_start(folder, rank, place) for rank, place in enumerate(where)]
        try:
            failed = _wait(ranks)
        finally:
            _end(ranks)
        if failed:
            raise _cause(folder, ranks, failed)
        return [json.loads((folder / f"result-{r}.json").read_text()) for r in range(nproc)]


def _start(folder: Path, rank: int, place: Place) -> subprocess.Popen[bytes]:
    environment = dict(os.environ) | dict(place.environment)
    # Workers that spin between operations take the cores from other ranks and from codecs.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    if sys.platform == "linux":
        # Local ranks need no host name lookup, which fails or is slow on many machines.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [*place.prefix, sys.executable, "-m", "thinwire.train.worker", str(folder), str(rank)]
    if rank == 0:
        return subprocess.Popen(command, env=environment)
    with open(folder / f"stderr-{rank}.txt", "wb") as stderr:
        return subprocess.Popen(command, env=environment, stderr=stderr)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the ranks that failed, in the order they were seen; empty if all ended well."""
    failed: list[int] = []
    deadline = float("inf")
    while time.monotonic() < deadline:
        for rank, process in enumerate(ranks):
            if process.poll() not in (None, 0) and rank not in failed:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if all(process.poll() is not None for process in ranks):
            break
        time.sleep(POLL_S)
    return failed


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for signum, patience_s in ((signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
        alive = [p for p in ranks if p.poll() is None]
        for process in alive:
            process.send_signal(signum)
        for process in alive:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue


def _cause(folder: Path, ranks: list[subprocess.Popen[bytes]], failed: list[int]) -> RankFailure:
    """Prefer an error meant for people, then the first failure that left a traceback."""
    reports = []
    for rank in failed:
        path = folder / f"error-{rank}.json"
        if path.exists():
            reports.append((rank, json.loads(path.read_text())))
    for _, report in reports:
        if report["for_people"]:
            return RankFailure(report["message"], report["status"])
    killed = [rank for rank in failed if (ranks[rank].returncode or 0) < 0]
    if killed:
        name = signal.Signals(-ranks[killed[0]].returncode).name
        return RankFailure(f"rank {killed[0]} was ended by {name}", 1)
    if reports:
        rank, report = reports[0]
        return RankFailure(f"rank {rank} failed:\n{report['message']}", 1)
    log = folder / f"stderr-{failed[0]}.txt"
    detail = log.read_text(errors="replace").strip() if log.exists() else ""
    return RankFailure(
        f"rank {failed[0]} ended with status {ranks[failed[0]].returncode}\n{detail}".strip(), 1
    )
