"""Put a workload's operations in time: one compute stream per stage, one stream per wire and stage.

Rules:
1. Operations start in the order in which they are issued on their stream, each when its stream is
   free and what it waits for has ended. Coding runs on the compute stream.
2. A message between stages takes its sender's wire.
3. A step ends when the compute streams have; what is still on a wire delays the next step, so that
   steps that carry something over are played three times and the last one counts.
4. A wire may save up while it is idle (a token bucket: `Costs.burst_s`, in seconds of its own
   speed) and then lets that much pass at once.
5. A message before which no other was under way for more than a millisecond takes
   `Costs.wake_s` longer.
6. While a compute stream waits, the part of the gap in which the awaited message's wire was busy is
   exposed communication, of the links whose messages were on it; the rest is waiting for another
   stage ("bubble").
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.plan.workload import Coding, Compute, Costs, Message, Op, Workload

__all__ = ["Timeline", "play"]

STEPS = 3
ASLEEP_S = 1e-3


@dataclass(slots=True)
class Timeline:
    """Where a step's seconds go, on the stage that ends last.

    Attributes:
        step_s: seconds of the step.
        compute_s: of arithmetic.
        encode_s: of encoding.
        decode_s: of decoding.
        exposed_s: of waiting for messages, per link.
        bubble_s: of waiting for other stages.
        busy_s: of messages on the wire, per link, hidden ones too.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: dict[str, float] = field(default_factory=dict)
    bubble_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)

    def add(self, other: "Timeline", share: float) -> None:
        """Add a share of another timeline."""
        for name in ("step_s", "compute_s", "encode_s", "decode_s", "bubble_s"):
            setattr(self, name, getattr(self, name) + share * getattr(other, name))
        for mine, theirs in ((self.exposed_s, other.exposed_s), (self.busy_s, other.busy_s)):
            for link, seconds in theirs.items():
                mine[link] = mine.get(link, 0.0) + share * seconds


@dataclass(slots=True)
class _Stream:
    free: float = 0.0
    used: float = -math.inf  # of a compute stream: when its last message will have ended
    saved: float = 0.0  # seconds of its speed that an idle wire has saved up
    flights: list[tuple[float, float, str]] = field(default_factory=list)  # (start, end, link)


@dataclass(slots=True)
class _Done:
    end: float
    wire: _Stream | None = None  # None for compute


def play(ops: Sequence[Op], costs: Costs, workload: Workload, *, slowdown: float = 1.0) -> Timeline:
    """Return the timeline of a step.

    Args:
        ops: in the order of issue.
        costs: what operations cost.
        workload: whose operations they are.
        slowdown: factor on all compute and coding, for the slowest rank.
    """
    durations = [_seconds(op, costs, workload, slowdown) for op in ops]
    repeats = STEPS if costs.burst_s or any(op.carried for op in ops) else 1
    streams: dict[tuple[str, int], _Stream] = defaultdict(_Stream)
    before: list[_Done] = []
    stages = sorted({op.stage for op in ops})
    parts = {stage: Timeline() for stage in stages}
    starts = dict.fromkeys(stages, 0.0)
    for _ in range(repeats):
        parts = {stage: Timeline() for stage in stages}
        starts = {stage: streams["compute", stage].free for stage in stages}
        done: list[_Done] = []
        for op, seconds in zip(ops, durations, strict=True):
            waits = [done[i] for i in op.after]
            waits += [before[i] for i in op.carried] if before else []
            # Nothing of a step begins before the stage's last one has ended.
            waits.append(_Done(starts[op.stage]))
            done.append(_place(op, seconds, waits, streams, parts[op.stage], costs))
        before = done
    last = max(stages, key=lambda stage: streams["compute", stage].free - starts[stage])
    timeline = parts[last]
    timeline.step_s = streams["compute", last].free - starts[last]
    return timeline


def _place(
    op: Op,
    seconds: float,
    waits: list[_Done],
    streams: dict[tuple[str, int], _Stream],
    part: Timeline,
    costs: Costs,
) -> _Done:
    work = op.work
    name = "wire " + costs.wire(work.axis) if isinstance(work, Message) else "compute"
    stream = streams[name, op.stage]
    latest = max(waits, key=lambda d: d.end, default=None)
    start = stream.free
    if latest is not None and latest.end > stream.free:
        start = latest.end
        if isinstance(work, Message):
            stream.saved = min(costs.burst_s, stream.saved + start - stream.free)
        else:
            _attribute(latest, stream.free, part)
    if isinstance(work, Message) and stream.saved:
        at_once = min(stream.saved, max(0.0, seconds - costs.least_s(work)))
        stream.saved -= at_once
        seconds -= at_once
    if isinstance(work, Message):
        host = streams["compute", op.stage]
        seconds += costs.wake_s(work) if start - host.used > ASLEEP_S else 0.0
        host.used = max(host.used, start + seconds)
    end = start + seconds
    stream.free = end
    if isinstance(work, Message):
        part.busy_s[work.link] = part.busy_s.get(work.link, 0.0) + seconds
        stream.flights.append((start, end, work.link))
        return _Done(end, stream)
    if isinstance(work, Compute):
        part.compute_s += seconds
    elif work.what == "encode":
        part.encode_s += seconds
    else:
        part.decode_s += seconds
    return _Done(end)


def _attribute(awaited: _Done, since: float, part: Timeline) -> None:
    """Book the seconds from `since` on in which a compute stream stood still."""
    rest, at = awaited.end - since, awaited.end
    for start, end, link in reversed(awaited.wire.flights if awaited.wire else []):
        if end > awaited.end:
            continue  # sent later
        if end <= since or end < at:
            break  # the wire stood still too: for another stage
        seconds = end - max(start, since)
        part.exposed_s[link] = part.exposed_s.get(link, 0.0) + seconds
        rest, at = rest - seconds, start
    part.bubble_s += max(rest, 0.0)


def _seconds(op: Op, costs: Costs, workload: Workload, slowdown: float) -> float:
    if isinstance(op.work, Message):
        return costs.seconds(op.work)
    if workload.speeds:
        slowdown /= workload.speeds[op.stage]
    if isinstance(op.work, Coding):
        return slowdown * costs.coding_s(op.work)
    return slowdown * costs.compute_s(op.work, workload)
