"""What a probe found out about a mesh: seconds by message size, and what codecs and compute cost.

The file is JSON with units in the names. Per process group and collective it holds measured points;
`Speed.seconds` reads between them. A message's size `nbytes` is always that of the tensor which one
rank hands in: its shard for an all-gather, the whole input for the others, the message for p2p.
Codecs go by their `repr`, which says all of their settings.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import ConfigError, RunError

__all__ = ["COLLECTIVES", "CodecSpeed", "Compute", "Group", "Links", "Point", "Speed"]

VERSION = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Seconds of one message size.

    Attributes:
        nbytes: bytes of the tensor that one rank hands in.
        median_s: median over rounds of the slowest rank's seconds.
        iqr_s: distance of the quartiles.
        rounds: measurements.
    """

    nbytes: int
    median_s: float
    iqr_s: float = 0.0
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.rounds < 1:
            raise ConfigError("nbytes and rounds must be at least 1")
        _need(self, ("median_s",), above_zero=True)
        _need(self, ("iqr_s",), above_zero=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One collective of a group.

    Attributes:
        points: by rising size.
        latency_s: seconds of the smallest message.
        bytes_per_s: message bytes per second beyond the latency, on large messages.
    """

    points: tuple[Point, ...]
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        sizes = [point.nbytes for point in self.points]
        if not sizes:
            raise ConfigError("points must hold at least one measurement")
        if sorted(set(sizes)) != sizes:
            raise ConfigError("points must rise in nbytes")
        _need(self, ("latency_s", "bytes_per_s"), above_zero=True)

    @classmethod
    def fit(cls, points: Sequence[Point]) -> "Speed":
        """Return the speed that measured points say.

        Latency is what `seconds` says of the smallest message; the slope is a line through the
        larger half of the sizes, each weighted by its inverse square time so that relative errors
        count alike.
        """
        ordered = tuple(sorted(points, key=lambda point: point.nbytes))
        if not ordered:
            raise ConfigError("points must hold at least one measurement")
        upper = ordered[-max(2, (len(ordered) + 1) // 2) :]
        last = ordered[-1]
        floor = _floor(ordered)
        # A large size that happened to go fast can flatten the line to any speed: half of the
        # straight way from the smallest to the largest message is the least it may rise.
        chord = (floor[-1] - floor[0]) / max(1, last.nbytes - ordered[0].nbytes)
        seconds_per_byte = max(_slope(upper), chord / 2)
        rate = 1 / seconds_per_byte if seconds_per_byte > 0 else last.nbytes / last.median_s
        return cls(points=ordered, latency_s=floor[0], bytes_per_s=rate)

    @property
    def disturbed(self) -> float:
        """Return the largest factor by which a message took longer than a larger one; 1: none."""
        floor = _floor(self.points)
        return max(p.median_s / least for p, least in zip(self.points, floor, strict=True))

    @classmethod
    def ideal(cls, latency_s: float, bytes_per_s: float) -> "Speed":
        """Return a speed of latency_s + nbytes / bytes_per_s exactly."""
        _need_value("latency_s", latency_s, above_zero=True)
        _need_value("bytes_per_s", bytes_per_s, above_zero=True)
        sizes = (1, 2**30)
        points = tuple(Point(nbytes=n, median_s=latency_s + n / bytes_per_s) for n in sizes)
        return cls(points=points, latency_s=latency_s, bytes_per_s=bytes_per_s)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message: never less for more bytes.

        The smallest measured message's seconds below it, straight lines between points (one that
        took longer than a larger one was disturbed, and takes that one's seconds), the slope beyond
        the last.
        """
        sizes = [point.nbytes for point in self.points]
        times = _floor(self.points)
        if nbytes <= sizes[0]:
            return times[0]
        if nbytes >= sizes[-1]:
            return times[-1] + (nbytes - sizes[-1]) / self.bytes_per_s
        right = bisect_left(sizes, nbytes)
        left = right - 1
        share = (nbytes - sizes[left]) / (sizes[right] - sizes[left])
        return times[left] + share * (times[right] - times[left])


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The process groups of one mesh axis, which all work at the same time.

    Attributes:
        ranks: world ranks of each group; empty tells that only their size is known.
        size: ranks of a group.
        collectives: speed by name, of `COLLECTIVES`.
        wake_s: seconds that a message takes longer after computation than after another message:
            on a host with as many ranks as cores, the thread that moves the bytes has to get a
            core first.
    """

    ranks: tuple[tuple[int, ...], ...]
    size: int
    collectives: Mapping[str, Speed]
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        _need(self, ("wake_s",), above_zero=False)
        if self.size < 2:
            raise ConfigError(f"size must be at least 2, got {self.size}")
        if any(len(group) != self.size for group in self.ranks):
            raise ConfigError(f"ranks must be lists of {self.size} ranks each")
        unknown = sorted(set(self.collectives) - set(COLLECTIVES))
        if unknown:
            raise ConfigError(f"unknown collective {unknown[0]!r}: known: {', '.join(COLLECTIVES)}")
        if not self.collectives:
            raise ConfigError("collectives must hold at least one of " + ", ".join(COLLECTIVES))

    def seconds(self, collective: str, nbytes: float) -> float:
        """Return the seconds of a collective whose every rank hands in `nbytes` bytes.

        Raises:
            ConfigError: it was not measured.
        """
        if collective not in self.collectives:
            known = ", ".join(self.collectives)
            raise ConfigError(f"the links hold no {collective}: measured were {known}")
        return self.collectives[collective].seconds(nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecSpeed:
    """Seconds of a codec on the device: latency plus seconds per value, each way.

    Attributes:
        encode_latency_s: of a message's encoding, whatever its size.
        encode_s_per_value: for each value.
        decode_latency_s: of a message's decoding.
        decode_s_per_value: for each value.
    """

    encode_latency_s: float
    encode_s_per_value: float
    decode_latency_s: float
    decode_s_per_value: float

    def __post_init__(self) -> None:
        _need(self, ("encode_latency_s", "decode_latency_s"), above_zero=False)
        _need(self, ("encode_s_per_value", "decode_s_per_value"), above_zero=True)

    def encode_s(self, numel: float) -> float:
        """Return the seconds to encode `numel` values."""
        return self.encode_latency_s + numel * self.encode_s_per_value

    def decode_s(self, numel: float) -> float:
        """Return the seconds to decode `numel` values."""
        return self.decode_latency_s + numel * self.decode_s_per_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """A step's computation on one rank, without communication.

    Attributes:
        recipe: whose step, or "module:function" of a user's own.
        step_s: median seconds.
        iqr_s: distance of the quartiles.
        rounds: measurements.
        tokens: tokens of the step on this rank; 0 where that isn't known.
        params: parameters of the model on this rank; 0 where that isn't known.
        forward_s: the part of forward passes; 0 where parts aren't known.
        backward_s: of backward passes.
        optimizer_s: of the optimizer.
    """

    recipe: str
    step_s: float
    iqr_s: float = 0.0
    rounds: int = 1
    tokens: int = 0
    params: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        _need(self, ("step_s",), above_zero=True)
        parts = ("iqr_s", "forward_s", "backward_s", "optimizer_s")
        _need(self, parts, above_zero=False)
        if self.rounds < 1 or self.tokens < 0 or self.params < 0:
            raise ConfigError("rounds must be at least 1, tokens and params at least 0")


@dataclass(frozen=True, kw_only=True)
class Links:
    """A mesh as probed: what links.json holds.

    Attributes:
        world_size: ranks.
        mesh: ranks per axis.
        groups: by axis; axes of one rank have none.
        codecs: by `repr` of the codec.
        compute: of a step, if one was timed.
        about: machine and versions, for people.
    """

    world_size: int
    mesh: Mapping[str, int]
    groups: Mapping[str, Group]
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    compute: Compute | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world_size < 1 or any(size < 1 for size in self.mesh.values()):
            raise ConfigError("world_size and every size in mesh must be at least 1")
        if math.prod(self.mesh.values()) != self.world_size:
            text = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
            raise ConfigError(f"mesh {text} doesn't fit world_size {self.world_size}")
        for axis, size in self.mesh.items():
            if size > 1 and axis not in self.groups:
                raise ConfigError(f"groups.{axis} is missing: mesh.{axis} has {size} ranks")
        for axis, group in self.groups.items():
            self._check_group(axis, group)

    def _check_group(self, axis: str, group: Group) -> None:
        if self.mesh.get(axis) != group.size:
            raise ConfigError(
                f"groups.{axis} has groups of {group.size} ranks, but mesh.{axis} is "
                f"{self.mesh.get(axis, 'missing')}"
            )
        named = [rank for ranks in group.ranks for rank in ranks]
        if named and sorted(named) != list(range(self.world_size)):
            raise ConfigError(
                f"groups.{axis}.ranks must name each of the {self.world_size} ranks once, "
                f"got {sorted(named)}"
            )

    def group(self, axis: str) -> Group:
        """Return an axis's group.

        Raises:
            ConfigError: the axis has one rank or wasn't probed.
        """
        if axis not in self.groups:
            raise ConfigError(f"the links hold no group {axis!r}: probed were {list(self.groups)}")
        return self.groups[axis]

    def to_dict(self) -> dict[str, Any]:
        """Return what the file holds, as plain JSON values."""
        values = {
            "version": VERSION,
            "about": dict(self.about),
            "world_size": self.world_size,
            "mesh": dict(self.mesh),
            "groups": {axis: asdict(group) for axis, group in self.groups.items()},
            "codecs": {name: asdict(speed) for name, speed in self.codecs.items()},
            "compute": None if self.compute is None else asdict(self.compute),
        }
        return json.loads(json.dumps(values))  # tuples as lists

    @classmethod
    def from_dict(cls, values: Any) -> "Links":
        """Return the links that a file's content describes.

        Raises:
            ConfigError: a missing or unknown key, a wrong type or an impossible number, named.
        """
        table = _table(values, "links")
        version = table.get("version")
        if type(version) is not int or version != VERSION:
            raise ConfigError(f"version {version!r} is unknown: this thinwire reads {VERSION}")
        keys = ("world_size", "mesh", "groups", "codecs", "compute")
        for key in keys:
            if key not in table:
                raise ConfigError(f"{key} is missing: the file is partial, probe again")
        _refuse_others(table, (*keys, "version", "about"), "")
        groups = _table(table["groups"], "groups")
        codecs = _table(table["codecs"], "codecs")
        compute = table["compute"]
        return cls(
            world_size=_value(table["world_size"], int, "world_size"),
            mesh={k: _value(v, int, f"mesh.{k}") for k, v in _table(table["mesh"], "mesh").items()},
            groups={axis: _group(value, f"groups.{axis}") for axis, value in groups.items()},
            codecs={k: _build(CodecSpeed, v, f"codecs.{k}") for k, v in codecs.items()},
            compute=None if compute is None else _build(Compute, compute, "compute"),
            about=_table(table.get("about", {}), "about"),
        )

    @classmethod
    def read(cls, path: str | Path) -> "Links":
        """Read links.json.

        Raises:
            ConfigError: missing, unreadable, partial, of another version, or with numbers that
                cannot be; one line that names the file and the key.
        """
        try:
            text = Path(path).read_text()
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist: `thinwire probe --out {path}` writes it") \
                from None  # fmt: skip
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        try:
            return cls.from_dict(json.loads(text))
        except (json.JSONDecodeError, RecursionError, ValueError) as error:
            raise ConfigError(f"{path} is no whole JSON file ({error}): probe again") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write links.json; the name appears only when the whole file is there.

        Raises:
            RunError: the folder cannot be written.
        """
        path = Path(path)
        part = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
            part.replace(path)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None
        finally:
            with suppress(OSError):
                part.unlink()


def _floor(points: Sequence[Point]) -> list[float]:
    """Return each point's seconds, or a larger one's where that was faster."""
    return list(accumulate((point.median_s for point in reversed(points)), min))[::-1]


def _slope(points: Sequence[Point]) -> float:
    """Return seconds per byte of the weighted least-squares line; 0 if there is none."""
    if len(points) < 2:
        return 0.0
    weights = [point.median_s**-2 for point in points]
    total = sum(weights)
    x = sum(w * p.nbytes for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p.median_s for w, p in zip(weights, points, strict=True)) / total
    pairs = list(zip(weights, points, strict=True))
    spread = sum(w * (p.nbytes - x) ** 2 for w, p in pairs)
    return sum(w * (p.nbytes - x) * (p.median_s - y) for w, p in pairs) / spread


def _group(value: Any, where: str) -> Group:
    table = dict(_table(value, where))
    for key in ("ranks", "size", "collectives"):
        if key not in table:
            raise ConfigError(f"{where}.{key} is missing: the file is partial, probe again")
    _refuse_others(table, ("ranks", "size", "collectives", "wake_s"), f"{where}.")
    collectives = _table(table["collectives"], f"{where}.collectives")
    speeds = {k: _speed(v, f"{where}.collectives.{k}") for k, v in collectives.items()}
    ranks = table["ranks"]
    if not isinstance(ranks, list) or not all(isinstance(group, list) for group in ranks):
        raise ConfigError(f"{where}.ranks must be lists of ranks, got {ranks!r}")
    groups = tuple(tuple(_value(r, int, f"{where}.ranks") for r in group) for group in ranks)
    size = _value(table["size"], int, f"{where}.size")
    wake_s = _value(table.get("wake_s", 0.0), float, f"{where}.wake_s")
    return _named(lambda: Group(ranks=groups, size=size, collectives=speeds, wake_s=wake_s), where)


def _speed(value: Any, where: str) -> Speed:
    table = dict(_table(value, where))
    points = table.get("points")
    if not isinstance(points, list):
        raise ConfigError(f"{where}.points must be a list, got {points!r}")
    table["points"] = tuple(
        _build(Point, point, f"{where}.points[{i}]") for i, point in enumerate(points)
    )
    return _build(Speed, table, where)


def _build(kind: type[T], value: Any, where: str) -> T:
    """Return a dataclass from a table that holds its fields and nothing else."""
    table = _table(value, where)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]} is unknown: known: {', '.join(known)}")
    arguments = {}
    for name, spec in known.items():
        if name not in table:
            raise ConfigError(f"{where}.{name} is missing: the file is partial, probe again")
        hint = spec.type if isinstance(spec.type, type) else object
        arguments[name] = _value(table[name], hint, f"{where}.{name}")
    return _named(lambda: kind(**arguments), where)


def _named(make: Any, where: str) -> Any:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _refuse_others(table: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ConfigError(f"{prefix}{unknown[0]} is unknown: known: {', '.join(known)}")


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, got {value!r:.60}")
    return value


def _value(value: Any, kind: type, where: str) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} is too large a number") from None
    if kind in (int, float, str) and type(value) is not kind:
        raise ConfigError(f"{where} must be of type {kind.__name__}, got {value!r:.60}")
    return value


def _need(node: object, names: Sequence[str], *, above_zero: bool) -> None:
    for name in names:
        _need_value(name, getattr(node, name), above_zero=above_zero)


def _need_value(name: str, value: float, *, above_zero: bool) -> None:
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        least = "above 0" if above_zero else "at least 0"
        raise ConfigError(f"{name} must be a finite number {least}, got {value}")
