"""What each rank of the lab does: train all arms in turn inside one process group.

1. Build every arm's trainer; take some steps with each, which compile kernels and open sockets.
2. In each round, for each arm: meet, read the interface's counters, take steps, read them again.
3. Return, per arm and round, the seconds of every step and the bytes by ledger and by interface.

Arms take turns, so that a machine that slows down slows all of them.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.train.loop import Trainer
from thinwire.train.parse import from_dict

__all__ = ["Trains", "measure", "sent_bytes", "take_turns"]

# A rank is done when its counter stands still for QUIET_S; one that never does is left after
# SETTLE_S.
QUIET_S, SETTLE_S = 0.1, 60.0


def sent_bytes(interface: str) -> int:
    """Return the bytes this network namespace has sent on an interface, headers included.

    Raises:
        ConfigError: there is no such interface.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ConfigError(f"this machine has no network interface {interface!r}")


def measure(payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Train the arms in rounds.

    Args:
        payload: `configs` (one per arm), `interface`, `warmup`, `rounds`, `steps` (per round) and
            `pad_s` (seconds of sleep added to every step, in place of more compute).

    Returns:
        Per arm and round: `step_s` (a number per step), `ledger_bytes`, `interface_bytes`.
    """
    trainers = []
    for values in payload["configs"]:
        config = from_dict(values)
        # Arms begin with the same weights and see the same batches.
        torch.manual_seed(config.seed)
        trainers.append(Trainer.build(replace(config, timing=False), torch.device("cpu")))
    return take_turns(trainers, payload)


class Trains(Protocol):
    """What has steps to measure."""

    def train_step(self) -> dict[str, Any]:
        """Do one step; `wire` in the answer has the booked bytes by link."""
        ...


def take_turns(trainers: Sequence[Trains], payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Train in rounds; arguments and answer as for `measure`."""
    for trainer in trainers:
        for _ in range(payload["warmup"]):
            trainer.train_step()
    found: list[list[dict[str, Any]]] = [[] for _ in trainers]
    for _ in range(payload["rounds"]):
        for trainer, rounds in zip(trainers, found, strict=True):
            rounds.append(_round(trainer, payload))
    return found


def _settle(interface: str) -> int:
    """Wait until no rank sends any more; return the bytes this one has sent by then. Collective.

    So each arm's bytes count with it: what a step launched for the next one (SCAPE's masks) may be
    on its way for a while.
    """
    dist.barrier()
    until, before = time.monotonic() + SETTLE_S, -1
    while (sent := sent_bytes(interface)) != before and time.monotonic() < until:
        before = sent
        time.sleep(QUIET_S)
    dist.barrier()
    return sent


def _round(trainer: Trains, payload: dict[str, Any]) -> dict[str, Any]:
    interface, pad_s = payload["interface"], payload["pad_s"]
    dist.barrier()
    before, step_s, booked = sent_bytes(interface), [], 0
    for _ in range(payload["steps"]):
        start = time.perf_counter()
        time.sleep(pad_s)
        record = trainer.train_step()
        step_s.append(time.perf_counter() - start)
        booked += sum(record["wire"].values())
    sent = _settle(interface)
    return {"step_s": step_s, "ledger_bytes": booked, "interface_bytes": sent - before}
