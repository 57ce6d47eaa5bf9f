"""A cluster described in TOML: nodes, devices, links, and what operations cost on it.

    nodes = 4
    devices_per_node = 8
    [inside]                    # a device's link to the others of its node, one way
    gbit_per_s = 2400.0
    latency_s = 3e-6
    [across]                    # a node's link to other nodes, one way, all its cards together
    gbit_per_s = 200.0
    latency_s = 5e-6
    [device]
    tflops = 50.0               # reached in training, not the data sheet's
    memory_gbyte_per_s = 900.0
    [sites]                     # optional: replicas in places that only an ordinary line joins
    count = 2
    up_gbit_per_s = 0.5
    down_gbit_per_s = 1.0
    latency_s = 0.05
    relay = true                # a store that takes a message once for all receivers

Ranks lie on devices in the mesh's order, tensor parallelism innermost. A group that has l of a
node's L devices gets l/L of the node's link. Collectives move as few bytes over it as they can: a
node takes in (R-l) shards of an all-gather, and an all-to-all crosses l times as often as a
reduce-scatter. Ring latency is a hop per rank; "log" takes log2 hops.
"""

import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.plan.job import AXES
from thinwire.plan.workload import Coding, Compute, Message, Workload

__all__ = ["Cluster", "ClusterCosts", "Device", "Line", "Sites"]

GBIT = 1e9 / 8
_PROBE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A link, one way.

    Attributes:
        gbit_per_s: speed that large messages reach.
        latency_s: of a message.
    """

    gbit_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _above_zero(self, ("gbit_per_s",))
        _at_least_zero(self, ("latency_s",))

    @property
    def bytes_per_s(self) -> float:
        """Return the speed in bytes."""
        return self.gbit_per_s * GBIT


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What one device does.

    Attributes:
        tflops: 10^12 floating-point operations per second that training reaches.
        memory_gbyte_per_s: memory bandwidth, 10^9 bytes per second.
        memory_gbyte: memory, 10^9 bytes; 0 where that doesn't matter.
        codec_share: fraction of the memory bandwidth that coding kernels reach.
        kernel_s: seconds to start a kernel.
    """

    tflops: float
    memory_gbyte_per_s: float
    memory_gbyte: float = 0.0
    codec_share: float = 0.5
    kernel_s: float = 5e-6

    def __post_init__(self) -> None:
        _above_zero(self, ("tflops", "memory_gbyte_per_s", "codec_share"))
        _at_least_zero(self, ("memory_gbyte", "kernel_s"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sites:
    """Places that hold replicas (dp_replicate), each behind a line of its own.

    Attributes:
        count: sites; replicas are dealt evenly.
        up_gbit_per_s: what a site sends.
        down_gbit_per_s: what it receives.
        latency_s: of a message.
        relay: a store takes a message once for all receivers.
        overhead_s: of an exchange, whatever its size (agreement, upload of metadata).
        speeds: how fast each site computes beside the described device; empty: all alike. Replicas
            take equal numbers of steps, so all wait for the slowest.
    """

    count: int
    up_gbit_per_s: float
    down_gbit_per_s: float
    latency_s: float = 0.05
    relay: bool = False
    overhead_s: float = 0.0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ConfigError(f"count must be at least 2, got {self.count}: leave [sites] out")
        _above_zero(self, ("up_gbit_per_s", "down_gbit_per_s"))
        _at_least_zero(self, ("latency_s", "overhead_s"))
        if self.speeds and (len(self.speeds) != self.count or not min(self.speeds) > 0):
            raise ConfigError(f"speeds must be {self.count} numbers above 0, got {self.speeds}")

    @property
    def slowest(self) -> float:
        """Return the factor on the slowest site's computation, at least 1."""
        return max(1.0, 1 / min(self.speeds)) if self.speeds else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes of equal devices; see the module.

    Attributes:
        nodes: all of them.
        devices_per_node: of one node.
        inside: link of a device inside its node; may be left out with one device per node.
        across: link of a node; may be left out with one node.
        device: what each computes.
        sites: lines between replicas, if they are apart.
        algorithm: hops of a collective's latency: "ring" or "log".
        prefetch: weight gathers that fly ahead of the layer that computes; 0: none.
    """

    nodes: int
    devices_per_node: int
    device: Device
    inside: Line | None = None
    across: Line | None = None
    sites: Sites | None = None
    algorithm: str = "ring"
    prefetch: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.algorithm not in ("ring", "log"):
            raise ConfigError(f"algorithm must be ring or log, got {self.algorithm!r}")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch must be at least 0, got {self.prefetch}")
        if self.devices_per_node > 1 and self.inside is None:
            raise ConfigError("[inside] is missing: the link between the devices of a node")
        if self.nodes > 1 and self.across is None and self.sites is None:
            raise ConfigError("[across] is missing: the link between nodes")

    @property
    def num_devices(self) -> int:
        """Return all devices."""
        return self.nodes * self.devices_per_node

    @classmethod
    def read(cls, path: str | Path) -> "Cluster":
        """Read a TOML file.

        Raises:
            ConfigError: missing, unreadable, or with a key or value that cannot be; one line.
        """
        try:
            values = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"cluster file {path} does not exist") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"cluster file {path} cannot be read: {error}") from None
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Cluster":
        """Return the cluster that a file's content describes.

        Raises:
            ConfigError: a missing or unknown key, or a value that cannot be.
        """
        return _build(cls, values, "")

    def with_nodes(self, num_devices: int) -> "Cluster":
        """Return the cluster with as many nodes as hold `num_devices`."""
        per_node = min(self.devices_per_node, num_devices)
        nodes = -(-num_devices // per_node)
        return replace(self, nodes=nodes, devices_per_node=per_node)

    def with_speed(self, gbit_per_s: float) -> "Cluster":
        """Return the cluster with another speed of its slowest kind of link."""
        if self.sites is not None:
            sites = replace(self.sites, up_gbit_per_s=gbit_per_s, down_gbit_per_s=gbit_per_s)
            return replace(self, sites=sites)
        if self.across is not None:
            return replace(self, across=replace(self.across, gbit_per_s=gbit_per_s))
        assert self.inside is not None
        return replace(self, inside=replace(self.inside, gbit_per_s=gbit_per_s))


_SECTIONS = {"inside": Line, "across": Line, "device": Device, "sites": Sites}


@dataclass(frozen=True)
class ClusterCosts:
    """`Costs` on a described cluster for one mesh.

    Attributes:
        cluster: the hardware.
        mesh: ranks per axis of `AXES`.

    Raises:
        ConfigError: the mesh has more ranks than the cluster has devices, or doesn't fit its nodes.
    """

    cluster: Cluster
    mesh: Mapping[str, int]
    _places: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        total = math.prod(self.mesh.values())
        if total > self.cluster.num_devices:
            raise ConfigError(
                f"the mesh has {total} ranks but the cluster {self.cluster.num_devices} devices "
                f"({self.cluster.nodes} nodes of {self.cluster.devices_per_node})"
            )
        tp, per_node = self.mesh["tp"], self.cluster.devices_per_node
        if tp > 1 and tp % per_node and per_node % tp:
            raise ConfigError(f"mesh.tp {tp} doesn't fit nodes of {per_node} devices")
        if self.cluster.sites is not None and self.mesh["dp_replicate"] % self.cluster.sites.count:
            raise ConfigError(
                f"mesh.dp_replicate {self.mesh['dp_replicate']} can't be dealt to "
                f"{self.cluster.sites.count} sites: make it a multiple"
            )

    @property
    def burst_s(self) -> float:
        """Return 0: described links have one speed; see `Costs`."""
        return 0.0

    def least_s(self, message: Message) -> float:
        """Return the seconds of a message; see `Costs`."""
        return self.seconds(message)

    def spread(self, axis: str) -> tuple[int, int]:
        """Return (ranks of a group on one node, nodes it spans)."""
        if axis not in self._places:
            per_node = self.cluster.devices_per_node
            per = min(per_node, self.mesh["dp_shard"])
            if axis == "world":
                size, stride = math.prod(self.mesh.values()), 1
            elif axis == "node":
                size, stride = per, 1
            elif axis == "nodes":
                size, stride = self.mesh["dp_shard"] // per, per_node
            else:
                size = self.mesh[axis]
                stride = math.prod(self.mesh[a] for a in AXES[AXES.index(axis) + 1 :])
            local = min(size, max(1, per_node // stride))
            self._places[axis] = (local, -(-size // local))
        return self._places[axis]

    def wire(self, axis: str) -> str:
        """Return the tier that an axis's messages queue on."""
        if axis in ("dp_replicate", "world") and self.cluster.sites is not None:
            return "sites"
        return "inside" if self.spread(axis)[1] == 1 else "across"

    def seconds(self, message: Message) -> float:
        """Return the seconds of a message; see `Costs`."""
        wire = self.wire(message.axis)
        if wire == "sites":
            return self._site_seconds(message)
        num, nbytes = message.num_ranks, message.nbytes
        local, nodes = self.spread(message.axis)
        if message.collective == "send_recv":
            line = self._line(wire)
            share = 1.0 if wire == "inside" else 1 / self.cluster.devices_per_node
            return line.latency_s + nbytes / (share * line.bytes_per_s)
        piece = nbytes if message.collective == "all_gather" else nbytes / num
        times = 2 if message.collective == "all_reduce" else 1
        exchange = message.collective == "all_to_all"
        seconds = 0.0
        if local > 1:
            assert self.cluster.inside is not None
            pieces = local - 1 if exchange else num - 1
            seconds = times * pieces * piece / self.cluster.inside.bytes_per_s
        if nodes > 1:
            assert self.cluster.across is not None
            share = local / self.cluster.devices_per_node * self.cluster.across.bytes_per_s
            pieces = (num - local) * (local if exchange else 1)
            seconds = max(seconds, times * pieces * piece / share)
        return seconds + times * self._latency(local, nodes, exchange)

    def _line(self, wire: str) -> Line:
        line = self.cluster.inside if wire == "inside" else self.cluster.across
        assert line is not None
        return line

    def _latency(self, local: int, nodes: int, exchange: bool) -> float:
        inside = self.cluster.inside.latency_s if self.cluster.inside and local > 1 else 0.0
        across = self.cluster.across.latency_s if self.cluster.across and nodes > 1 else 0.0
        if self.cluster.algorithm == "log" or exchange:
            return inside * math.ceil(math.log2(local)) + across * math.ceil(math.log2(nodes))
        return inside * nodes * (local - 1) + across * (nodes - 1)

    def _site_seconds(self, message: Message) -> float:
        """Return the seconds of a message between sites: a replica's ranks share its line."""
        sites = self.cluster.sites
        assert sites is not None
        if message.axis == "world":
            return 2 * sites.latency_s
        inner = math.prod(self.mesh.values()) // self.mesh["dp_replicate"]
        if message.link == "outer":
            inner = 1  # a whole replica's message counts once
        per_site = self.mesh["dp_replicate"] // sites.count
        away = message.num_ranks - per_site
        if message.collective == "all_gather":
            received = away * message.nbytes
            sent = per_site * message.nbytes * (1 if sites.relay else away)
        else:
            sent = received = per_site * message.sent
        up = inner * sent / (sites.up_gbit_per_s * GBIT)
        down = inner * received / (sites.down_gbit_per_s * GBIT)
        # A store hands out what has been taken in; without one both ways flow at once.
        flow = up + down if sites.relay else max(up, down)
        return sites.overhead_s + 2 * sites.latency_s + flow

    def coding_s(self, coding: Coding) -> float:
        """Return the seconds to encode or decode: kernels bound by memory."""
        if coding.codec.facts.exact:
            return 0.0  # a copy that the dense path makes too
        device = self.cluster.device
        wire = coding.codec.wire_nbytes(_PROBE, torch.float32) / _PROBE
        traffic = coding.numel * (4.0 + wire)
        rate = device.codec_share * device.memory_gbyte_per_s * 1e9
        return coding.calls * device.kernel_s + traffic / rate

    def compute_s(self, compute: Compute, workload: Workload) -> float:
        """Return the seconds of arithmetic: matrix products, then passes over memory."""
        device = self.cluster.device
        return compute.flops / (device.tflops * 1e12) + compute.nbytes / (
            device.memory_gbyte_per_s * 1e9
        )


def _build(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {where}{key}: known: {', '.join(known)}")
    made: dict[str, Any] = {}
    for name, spec in known.items():
        if name not in values:
            if spec.default is MISSING:
                raise ConfigError(f"{where}{name} is missing")
            continue
        made[name] = _value(name, values[name], spec.type, where)
    try:
        return kind(**made)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}" if where else str(error)) from None


def _value(name: str, value: Any, hint: Any, where: str) -> Any:
    if name in _SECTIONS and not where:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a section [{name}], got {value!r}")
        return _build(_SECTIONS[name], value, f"{name}.")
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or any(type(v) not in (int, float) for v in value):
            raise ConfigError(f"{where}{name} must be a list of numbers, got {value!r}")
        return tuple(float(v) for v in value)
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where}{name} must be of type {hint.__name__}, got {value!r}")
    return value


def _above_zero(node: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(node, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be above 0, got {value}")


def _at_least_zero(node: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(node, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be at least 0, got {value}")
