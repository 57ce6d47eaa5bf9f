"""What operations cost on a described cluster (the rules stand in `plan.cluster`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from thinwire.errors import ConfigError
from thinwire.plan.cluster import GBIT, Cluster, Line
from thinwire.plan.job import AXES
from thinwire.plan.workload import Coding, Compute, Message, Workload, as_gather

__all__ = ["ClusterCosts"]

_PROBE = 2**20


@dataclass(frozen=True)
class ClusterCosts:
    """`Costs` on a described cluster for one mesh.

    Attributes:
        cluster: the hardware.
        mesh: ranks per axis of `AXES`.
        unlike_ranks: ranks in all of unlike replicas, which don't fill the mesh and whose stages
            are neighbours; 0: replicas are equal.

    Raises:
        ConfigError: the mesh has more ranks than the cluster has devices, or doesn't fit its nodes.
    """

    cluster: Cluster
    mesh: Mapping[str, int]
    unlike_ranks: int = 0
    _places: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        total = self.unlike_ranks or math.prod(self.mesh.values())
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
                f"{self.mesh['dp_replicate']} replicas can't be dealt evenly to "
                f"{self.cluster.sites.count} sites: make their number (mesh.dp_replicate, or of "
                "mesh.replicas) a multiple"
            )

    def wake_s(self, message: Message) -> float:
        """Return nothing: devices don't share cores with what moves bytes; see `Costs`."""
        return 0.0

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
                size, stride = self.unlike_ranks or math.prod(self.mesh.values()), 1
            elif axis == "node":
                size, stride = per, 1
            elif axis == "nodes":
                size, stride = self.mesh["dp_shard"] // per, per_node
            else:
                # Stages lie farthest apart, but for unlike replicas, whose ranks are neighbours.
                order = ("dp_replicate", "pp", "dp_shard", "tp") if self.unlike_ranks else AXES
                size = self.mesh[axis]
                stride = math.prod(self.mesh[a] for a in order[order.index(axis) + 1 :])
            local = min(size, max(1, per_node // stride))
            self._places[axis] = (local, -(-size // local))
        return self._places[axis]

    def wire(self, axis: str) -> str:
        """Return the tier that an axis's messages queue on."""
        if axis in ("dp_replicate", "world") and self.cluster.sites is not None:
            return "sites"
        return "inside" if self.spread(axis)[1] == 1 else "across"

    @property
    def slowest_wire(self) -> str:
        """Return the slowest kind of link that the mesh uses: "sites", "across" or "inside"."""
        used = {self.wire(axis) for axis, size in self.mesh.items() if size > 1}
        return next((wire for wire in ("sites", "across") if wire in used), "inside")

    def seconds(self, message: Message) -> float:
        """Return the seconds of a message; see `Costs`."""
        wire = self.wire(message.axis)
        if wire == "sites":
            return self._site_seconds(message)
        if message.collective == "broadcast":
            message = as_gather(message)
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
            pieces = local - 1 if exchange else num - 1
            seconds = times * pieces * piece / self._line("inside").bytes_per_s
        if nodes > 1:
            share = local / self.cluster.devices_per_node * self._line("across").bytes_per_s
            pieces = (num - local) * (local if exchange else 1)
            seconds = max(seconds, times * pieces * piece / share)
        return seconds + times * self._latency(local, nodes, exchange)

    def _line(self, wire: str) -> Line:
        line = self.cluster.inside if wire == "inside" else self.cluster.across
        if line is None:
            raise ConfigError(
                f"ranks of this mesh talk {wire} {'a node' if wire == 'inside' else 'nodes'}, and "
                f"the cluster has no [{wire}]: add gbit_per_s and latency_s there"
            )
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
