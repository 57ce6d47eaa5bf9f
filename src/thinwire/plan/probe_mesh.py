"""Probe a mesh: links, codecs, and a step's computation, within a stated time.

The result is the same on every rank. Shares of the time: links 60 %, codecs 20 %, the step 20 %;
what isn't asked for leaves its share to the links.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _compat
from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.plan.links import COLLECTIVES, CodecSpeed, Group, Links, Speed
from thinwire.plan.probe_clock import Clock, interruptible
from thinwire.plan.probe_device import (
    Work,
    measure_codec,
    measure_select,
    measure_sparse,
    measure_step,
)
from thinwire.plan.probe_links import measure_groups, measure_wakes
from thinwire.plan.workload import SELECT, SPARSE

__all__ = ["probe"]

_CODECS_SHARE = _STEP_SHARE = 0.2
# A bound of the whole probe that even one hung message keeps.
TIMEOUT_S = 120.0


def probe(
    mesh: DeviceMesh | None = None,
    *,
    codecs: Sequence[Codec] = (),
    work: Work | None = None,
    seconds: float = 30.0,
    max_nbytes: int = 2**30,
    collectives: Sequence[str] = COLLECTIVES,
    device: torch.device | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: bool = False,
    about: Mapping[str, Any] | None = None,
) -> Links:
    """Measure a mesh; every rank of the default group calls it with the same arguments.

    Args:
        mesh: process groups by axis, names required; None takes all ranks as one axis "world".
        codecs: whose speed to take; with any, also those of arms' own passes (`SELECT`, `SPARSE`).
        work: a step whose computation to time.
        seconds: time to stay within, beside compiling codecs and three rounds of everything.
        max_nbytes: bytes a rank may send, beside three rounds of the smallest messages.
        collectives: names of what to measure.
        device: where messages lie; default CPU.
        timeout_s: seconds after which a rank that doesn't answer ends the probe.
        progress: show a bar on rank 0.
        about: machine and versions, for people.

    Returns:
        What `Links.write` puts into links.json.

    Raises:
        ConfigError: no process group, a mesh without names, an unknown collective, a budget of
            nothing.
        ProbeError: a codec or the step raised on some rank; every rank raises.
        PeerError: a rank was lost or didn't answer in time.
        ProbeInterrupted: Ctrl-C or SIGTERM on some rank; every rank raises.

    Example:
        >>> links = tw.plan.probe(mesh, codecs=[Blockwise(bits=4)], seconds=10)
        >>> links.group("dp_shard").seconds("all_gather", 1_000_000)
    """
    if not dist.is_initialized():
        raise ConfigError("probe needs a process group: call torch.distributed.init_process_group")
    for name in collectives:
        if name not in COLLECTIVES:
            raise ConfigError(f"unknown collective {name!r}: known: {', '.join(COLLECTIVES)}")
    sizes, groups, ranks = _axes(mesh)
    clock = Clock(
        seconds,
        max_nbytes,
        device or torch.device("cpu"),
        timeout_s=timeout_s,
        progress=progress,
    )
    limited = [_compat.default_group(), *groups.values()]
    try:
        with interruptible(clock), _compat.group_timeout(limited, timeout_s):
            speeds, wakes, codec_speeds, compute = _measure(
                clock, groups, collectives, codecs, work
            )
    finally:
        clock.close()
    return Links(
        world_size=dist.get_world_size(),
        mesh=sizes,
        groups={
            axis: Group(
                ranks=ranks[axis], size=sizes[axis], collectives=speeds[axis], wake_s=wakes[axis]
            )
            for axis in groups
        },
        codecs=codec_speeds,
        compute=compute,
        about=about or {},
    )


def _measure(
    clock: Clock,
    groups: Mapping[str, dist.ProcessGroup],
    collectives: Sequence[str],
    codecs: Sequence[Codec],
    work: Work | None,
) -> tuple[dict[str, dict[str, Speed]], dict[str, float], dict[str, CodecSpeed], Any]:
    codecs_share = _CODECS_SHARE if codecs else 0.0
    step_share = _STEP_SHARE if work is not None else 0.0
    # The step first: what it leaves in memory and caches is what messages meet in training.
    compute = None
    if work is not None:
        compute = measure_step(work, clock, step_share * clock.seconds)
    codec_speeds = {}
    share_s = codecs_share * clock.seconds / (len(codecs) + 2)
    for codec in dict.fromkeys(codecs):
        clock.show(repr(codec))
        codec_speeds[repr(codec)] = measure_codec(codec, clock, share_s)
    if codecs:
        clock.show(SELECT)
        codec_speeds[SELECT] = measure_select(clock, share_s)
        clock.show(SPARSE)
        codec_speeds[SPARSE] = measure_sparse(clock, share_s)
    wakes = measure_wakes(groups, clock)
    # Codecs may have had to be compiled: the links keep their share whatever that took.
    until_s = max(
        clock.seconds, clock.elapsed_s + (1 - _CODECS_SHARE - _STEP_SHARE) * clock.seconds
    )
    speeds = measure_groups(groups, clock, collectives=collectives, until_s=until_s)
    return speeds, wakes, codec_speeds, compute


def _axes(
    mesh: DeviceMesh | None,
) -> tuple[dict[str, int], dict[str, dist.ProcessGroup], dict[str, tuple[tuple[int, ...], ...]]]:
    """Return ranks per axis; this rank's group, and all groups' ranks, of axes of several ranks."""
    if mesh is None:
        count = dist.get_world_size()
        world = {"world": _compat.default_group()} if count > 1 else {}
        return {"world": count}, world, {"world": (tuple(range(count)),)}
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError("the mesh to probe needs mesh_dim_names: they name the groups")
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    several = [axis for axis, size in sizes.items() if size > 1]
    ranks = {}
    for index, axis in enumerate(names):
        rows = mesh.mesh.movedim(index, -1).reshape(-1, sizes[axis]).tolist()
        ranks[axis] = tuple(tuple(row) for row in rows)
    return sizes, {axis: mesh.get_group(axis) for axis in several}, ranks
