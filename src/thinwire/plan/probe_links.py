"""Seconds of collectives by message size, over every process group of a mesh.

1. All groups of an axis work at the same time, as in training.
2. Sizes rise by four from 1 KiB. At each size, each axis and collective gets its share of what is
   left of time and bytes; one that could not take three rounds within it goes no further.
3. A round's seconds are the slowest rank's; a point holds their median over rounds.

Legend: `R` ranks of a group.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from thinwire import _compat
from thinwire.comm import transport
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent, reduce_scatter_sent
from thinwire.plan.links import Point, Speed
from thinwire.plan.probe_clock import Clock

__all__ = ["measure_groups", "measure_wakes", "spread_s"]

SIZES = tuple(2**10 * 4**i for i in range(9))  # 1 KiB to 64 MiB
MIN_ROUNDS, MAX_ROUNDS = 3, 15
# Calls of a round: enough that the clock and the meeting before it don't count.
SAMPLE_S, MAX_CALLS = 0.002, 10
# Messages that say what waking costs: at most so many of this size, each after so much computation,
# within this share of the time.
WAKE_TURNS, WAKE_NBYTES, WAKE_COMPUTE_S, WAKE_SHARE = 30, 2**10, 0.008, 0.1


@dataclass(frozen=True)
class Message:
    """A collective of one size, ready to be called.

    Attributes:
        nbytes: of the tensor this rank hands in.
        sent_nbytes: what a rank sends in a call.
        call: does it, and waits.
        steps: messages of a call one after the other (2: there and back).
    """

    nbytes: int
    sent_nbytes: int
    call: Callable[[], object]
    steps: int = 1


def _all_gather(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Message:
    shard = max(1, nbytes // group.size())
    x = torch.zeros(shard, dtype=torch.uint8, device=device)
    received = x.new_empty(shard * group.size())
    sent = all_gather_sent(shard, group.size())
    return Message(shard, sent, lambda: _compat.all_gather_single(received, x, group=group))


def _reduce_scatter(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Message:
    chunk = max(1, nbytes // (4 * group.size()))
    x = torch.zeros(chunk * group.size(), device=device)
    part = x.new_empty(chunk)
    sent = reduce_scatter_sent(4 * chunk, group.size())
    return Message(x.nbytes, sent, lambda: transport.dense_reduce_scatter(part, x, group))


def _all_reduce(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Message:
    x = torch.zeros(max(1, nbytes // 4), device=device)
    sent = all_reduce_sent(x.nbytes, group.size())
    return Message(x.nbytes, sent, lambda: dist.all_reduce(x, group=group))


def _all_to_all(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Message:
    chunk = max(1, nbytes // group.size())
    x = torch.zeros(group.size(), chunk, dtype=torch.uint8, device=device)
    sent = reduce_scatter_sent(chunk, group.size())
    return Message(x.nbytes, sent, lambda: transport.all_to_all(x, group))


def _send_recv(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Message:
    """There and back between neighbours 0-1, 2-3, ...; an odd last rank looks on."""
    x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    me = group.rank()
    peer = me ^ 1

    def call() -> None:
        if peer >= group.size():
            return
        if me < peer:
            transport.send(x, peer, group)
            transport.recv(nbytes, peer, group, device)
        else:
            transport.recv(nbytes, peer, group, device)
            transport.send(x, peer, group)

    return Message(nbytes, nbytes, call, steps=2)


MESSAGES: dict[str, Callable[[dist.ProcessGroup, int, torch.device], Message]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


@dataclass
class _Cell:
    """One axis and collective on its way through the sizes."""

    axis: str
    collective: str
    group: dist.ProcessGroup
    points: list[Point] = field(default_factory=list)
    goes_on: bool = True


def measure_groups(
    groups: Mapping[str, dist.ProcessGroup],
    clock: Clock,
    *,
    collectives: Sequence[str],
    until_s: float,
) -> dict[str, dict[str, Speed]]:
    """Return each axis's speeds by collective; every rank calls it with the same axes.

    Args:
        groups: this rank's group of each axis of two ranks or more.
        clock: the budget; every collective is measured at the smallest size whatever it says.
        collectives: names, of `MESSAGES`.
        until_s: seconds after the clock's start at which measuring ends.

    Raises:
        PeerError, ProbeInterrupted: see `Clock`.
    """
    cells = [_Cell(axis, name, group) for axis, group in groups.items() for name in collectives]
    for size in SIZES:
        active = [cell for cell in cells if cell.goes_on]
        for index, cell in enumerate(active):
            left = len(active) - index
            bytes_left = clock.max_nbytes - clock.sent_nbytes
            share = _Share(clock.left_s(until_s) / left, bytes_left / left)
            with clock.peers(f"{cell.collective} over {cell.axis}"):
                _measure(cell, size, clock, share)
    found: dict[str, dict[str, Speed]] = {axis: {} for axis in groups}
    for cell in cells:
        found[cell.axis][cell.collective] = Speed.fit(cell.points)
    return found


def measure_wakes(groups: Mapping[str, dist.ProcessGroup], clock: Clock) -> dict[str, float]:
    """Return each axis's seconds by which a small message takes longer after computation.

    Ranks compute for a fixed time and send, again and again: what a turn takes beyond that time,
    less what a turn takes without computation. Means, as a thread gets a core at once or at the
    next tick. 0 where the difference is within its error, and on devices, which compute beside the
    host.

    Raises:
        PeerError, ProbeInterrupted: see `Clock`.
    """
    if clock.device.type != "cpu":
        return dict.fromkeys(groups, 0.0)
    found = {}
    for axis, group in groups.items():
        clock.show(f"{axis} after computation")
        message = MESSAGES["all_gather"](group, WAKE_NBYTES, clock.device)
        with clock.peers(f"all_gather over {axis}"):
            message.call()
            (once_s,) = clock.agree([clock.time_s(message.call)])
            affordable = WAKE_SHARE * clock.seconds / len(groups) / (2 * once_s + WAKE_COMPUTE_S)
            turns = max(MIN_ROUNDS, min(WAKE_TURNS, int(affordable)))
            at_once, woken = (_turns_s(message, turns, c) for c in (0.0, WAKE_COMPUTE_S))
        clock.sent_nbytes += message.sent_nbytes * (4 + 2 * turns)
        beyond_s = statistics.fmean(woken) - statistics.fmean(at_once)
        error_s = sum(statistics.variance(samples) / turns for samples in (at_once, woken)) ** 0.5
        beyond_s, error_s = clock.agree([beyond_s, error_s])
        found[axis] = beyond_s if beyond_s > 2 * error_s else 0.0
    return found


def _turns_s(message: Message, turns: int, compute_s: float) -> list[float]:
    """Return the seconds of turns beyond their computation, a first one left out."""
    x = torch.ones(128, 128)
    samples, before = [], time.perf_counter()
    for _ in range(turns + 1):
        end = before + compute_s
        while time.perf_counter() < end:
            torch.mm(x, x)
        message.call()
        now = time.perf_counter()
        samples.append(now - before - compute_s)
        before = now
    return samples[1:]


@dataclass(frozen=True)
class _Share:
    """What a cell may take for one size."""

    seconds: float
    nbytes: float


def _measure(cell: _Cell, size: int, clock: Clock, share: _Share) -> None:
    """Add the point of one size, or end the cell where it doesn't fit its share."""
    if not _fits(cell, size, share):
        cell.goes_on = False
        return
    clock.show(f"{cell.axis} {cell.collective} {_human(size)}")
    message = MESSAGES[cell.collective](cell.group, size, clock.device)
    message.call()  # opens sockets
    clock.meet()
    (once_s,) = clock.agree([clock.time_s(message.call)])
    rounds, calls = _rounds(max(once_s, 1e-7), message.sent_nbytes, share)
    samples = []
    for _ in range(rounds):
        clock.meet()
        samples.append(clock.time_s(message.call, calls) / message.steps)
    slowest = clock.agree(samples)
    clock.sent_nbytes += message.sent_nbytes * (2 + rounds * calls)
    point = Point(
        nbytes=message.nbytes,
        median_s=max(statistics.median(slowest), 1e-9),
        iqr_s=spread_s(slowest),
        rounds=rounds,
    )
    cell.points.append(point)


def _rounds(once_s: float, sent_nbytes: int, share: _Share) -> tuple[int, int]:
    """Return rounds and calls of a round, within half of the share: larger sizes come next."""
    calls = max(1, min(MAX_CALLS, round(SAMPLE_S / once_s)))
    affordable = int(share.nbytes / 2 / sent_nbytes) - 2
    calls = max(1, min(calls, affordable // MIN_ROUNDS))
    rounds = int(min(share.seconds / 2 / (once_s * calls), affordable / calls, MAX_ROUNDS))
    return max(MIN_ROUNDS, rounds), calls


def _fits(cell: _Cell, size: int, share: _Share) -> bool:
    if not cell.points:
        return True
    last = cell.points[-1]
    nbytes = last.nbytes * size // SIZES[len(cell.points) - 1]
    seconds = (2 + MIN_ROUNDS) * Speed.fit(cell.points).seconds(nbytes)
    # No collective sends more than twice its tensor; all-gather's tensor is what arrives.
    return seconds <= share.seconds and (2 + MIN_ROUNDS) * 2 * size <= share.nbytes


def spread_s(samples: Sequence[float]) -> float:
    """Return the distance of the quartiles, 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]


def _human(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"
