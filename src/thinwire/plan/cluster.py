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
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError

__all__ = ["GBIT", "LEAST", "MOST", "Cluster", "Device", "Line", "Sites"]

GBIT = 1e9 / 8
# Speeds beyond these are slips of the pen, and quotients of them overflow.
LEAST, MOST = 1e-9, 1e12
_MOST_DEVICES = 10**6


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
        memory_gbyte: memory, 10^9 bytes, which a run must fit; 0: not asked.
        codec_share: fraction of the memory bandwidth that coding kernels reach, at most 1.
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
        if self.codec_share > 1:
            raise ConfigError(
                f"codec_share must be at most 1, a fraction of memory_gbyte_per_s, got "
                f"{self.codec_share}"
            )


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
        _at_most_devices(self, ("count",))
        _above_zero(self, ("up_gbit_per_s", "down_gbit_per_s"))
        _at_least_zero(self, ("latency_s", "overhead_s"))
        if self.speeds and (
            len(self.speeds) != self.count or any(not LEAST <= v <= MOST for v in self.speeds)
        ):
            raise ConfigError(
                f"speeds must be {self.count} numbers above 0, from {LEAST:g} to {MOST:g}, got "
                f"{list(self.speeds)}"
            )

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
        _at_most_devices(self, ("nodes", "devices_per_node", "prefetch"))
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

    def with_speed(self, wire: str, gbit_per_s: float) -> "Cluster":
        """Return the cluster with another speed of "inside", "across" or "sites"."""
        if wire == "sites":
            assert self.sites is not None
            sites = replace(self.sites, up_gbit_per_s=gbit_per_s, down_gbit_per_s=gbit_per_s)
            return replace(self, sites=sites)
        line = self.inside if wire == "inside" else self.across
        assert line is not None
        changed = replace(line, gbit_per_s=gbit_per_s)
        return replace(self, inside=changed) if wire == "inside" else replace(self, across=changed)


_SECTIONS = {"inside": Line, "across": Line, "device": Device, "sites": Sites}


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
        return tuple(_float(f"{where}{name}", v) for v in value)
    if hint is float and type(value) is int:
        value = _float(f"{where}{name}", value)
    if type(value) is not hint:
        raise ConfigError(f"{where}{name} must be of type {hint.__name__}, got {value!r}")
    return value


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(
            f"{name} is a number of {len(str(value))} digits: at most {MOST:g}"
        ) from None


def _above_zero(node: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(node, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be above 0, got {value}")
        if not LEAST <= value <= MOST:
            raise ConfigError(f"{name} must lie between {LEAST:g} and {MOST:g}, got {value}")


def _at_most_devices(node: object, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(node, name) > _MOST_DEVICES:
            raise ConfigError(f"{name} must be at most {_MOST_DEVICES}")


def _at_least_zero(node: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(node, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be at least 0, got {value}")
        if value > MOST:
            raise ConfigError(f"{name} must be at most {MOST:g}, got {value}")
