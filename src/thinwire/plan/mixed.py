"""Several unlike replicas as one workload: each has stages of its own, and they meet.

Replicas wait for each other twice in a step: where they agree on loss and norm, and, in the last
step of a round, before the exchange. Their operations stand one replica after the other between
these meetings, in which the first message of each waits for all. Stages of a replica hand in their
parts of an exchange one after the other, over the one line that a site has.
"""

from collections.abc import Sequence
from dataclasses import replace

from thinwire.errors import ConfigError
from thinwire.plan.build import workload_of
from thinwire.plan.job import Job
from thinwire.plan.workload import Coding, Compute, Message, Op, Phase, Workload

__all__ = ["mixed_workload"]

MEETINGS = "scalars", "outer"
EXCHANGE = "outer", "dp_replicate"
Work = Compute | Coding | Message


def mixed_workload(name: str, jobs: Sequence[Job], speeds: Sequence[float] = ()) -> Workload:
    """Return what the steps of unlike replicas do.

    Args:
        name: for people.
        jobs: of the replicas, with the same rounds; axes other than pp and dp_replicate have one
            rank. `params` of the first is the model's.
        speeds: each replica's computing speed beside the described device; empty: 1 each.

    Raises:
        ConfigError: jobs without rounds, or with different ones, or with other axes.
    """
    every = {job.outer.sync_every if job.outer is not None else 0 for job in jobs}
    wide = any(job.mesh["dp_shard"] * job.mesh["tp"] > 1 for job in jobs)
    if len(jobs) < 2 or len(every) != 1 or 0 in every or wide:
        raise ConfigError(
            "unlike replicas are two or more, with the same outer rounds and one rank per stage"
        )
    parts = [workload_of(job) for job in jobs]
    num_ranks = sum(job.mesh["pp"] for job in jobs)
    phases = [
        Phase(alike[0].name, alike[0].share, _joined([phase.ops for phase in alike], num_ranks))
        for alike in zip(*(part.phases for part in parts), strict=True)
    ]
    slow = speeds or [1.0] * len(jobs)
    busiest = max(parts, key=lambda part: part.flops)
    return replace(
        busiest,
        name=name,
        phases=tuple(phases),
        num_ranks=num_ranks,
        mesh={**jobs[0].mesh, "pp": max(job.mesh["pp"] for job in jobs)},
        params=jobs[0].params,
        memory=max((part.memory for part in parts), key=lambda m: sum(m.values())),
        systems={link: what for part in parts for link, what in part.systems.items()},
        speeds=tuple(s for job, s in zip(jobs, slow, strict=True) for _ in job.stages),
    )


def _joined(replicas: Sequence[Sequence[Op]], num_ranks: int) -> tuple[Op, ...]:
    """Return the operations of all replicas, cut at their meetings and renumbered."""
    cuts = [_cuts(ops) for ops in replicas]
    first_stage = [0]
    for ops in replicas:
        first_stage.append(first_stage[-1] + 1 + max(max(op.stage, op.to_stage) for op in ops))
    order = [
        (replica, index)
        for part in range(len(MEETINGS) + 1)
        for replica, ops in enumerate(replicas)
        for index in range(cuts[replica][part], cuts[replica][part + 1])
    ]
    number = {place: new for new, place in enumerate(order)}
    met = [
        tuple(
            number[replica, i]
            for replica, ops in enumerate(replicas)
            if cuts[replica][part] < len(ops)
            for i in ops[cuts[replica][part]].after
        )
        for part in range(1, len(MEETINGS) + 1)
    ]
    joined: list[Op] = []
    handed_in: dict[int, int] = {}  # replica -> its last message of the exchange
    for replica, index in order:
        op, shift = replicas[replica][index], first_stage[replica]
        after = {number[replica, i] for i in op.after}
        for part, waits in enumerate(met, start=1):
            after |= set(waits) if index == cuts[replica][part] else set()
        if isinstance(op.work, Message) and (op.work.link, op.work.axis) == EXCHANGE:
            after |= {handed_in[replica]} if replica in handed_in else set()
            handed_in[replica] = len(joined)
        joined.append(
            Op(
                _among_all(op.work, num_ranks),
                tuple(sorted(after)),
                tuple(number[replica, i] for i in op.carried),
                op.stage + shift,
                op.to_stage + shift if op.to_stage >= 0 else -1,
            )
        )
    return tuple(joined)


def _among_all(work: Work, num_ranks: int) -> Work:
    """Return what a replica's builder took for the ranks of replicas like it."""
    if isinstance(work, Message) and work.axis == "world":
        return replace(work, num_ranks=num_ranks)
    return work


def _cuts(ops: Sequence[Op]) -> list[int]:
    """Return where a replica's operations begin, meet the others' (its end if they don't), end."""
    found = [0]
    for link in MEETINGS:
        places = (
            i for i, op in enumerate(ops) if isinstance(op.work, Message) and op.work.link == link
        )
        found.append(max(found[-1], next(places, len(ops))))
    return [*found, len(ops)]
