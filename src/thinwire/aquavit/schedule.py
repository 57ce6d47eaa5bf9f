"""When which precision: levels of bits per weight, and the rules from optimizer step to level.

A level is (bits, block_size): `bits` payload bits per weight and 32 bits of metadata per block, so
bpw = bits + 32/block_size bits per weight travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from thinwire.codecs import Blockwise, Codec
from thinwire.errors import ConfigError

__all__ = ["LEVEL_PRESETS", "Difference", "Level", "Schedule", "Static"]

_BLOCKS = (1024, 512, 256, 128, 64, 32)
_TIE = 1e-9


@dataclass(frozen=True)
class Level:
    """One precision: `bits` per weight, one scale and minimum per `block_size` weights."""

    bits: int
    block_size: int

    @property
    def bpw(self) -> float:
        """Return bits per weight on the wire."""
        return self.bits + 32 / self.block_size

    def __str__(self) -> str:
        return f"({self.bits}, {self.block_size})"


LEVEL_PRESETS: dict[str, tuple[tuple[int, int], ...]] = {
    "full18": tuple((b, g) for b in (2, 4, 6) for g in _BLOCKS),
    "coarse9": tuple((b, g) for b in (2, 4, 6) for g in (1024, 512, 32)),
    "widths": tuple((b, 2048) for b in (2, 4, 6, 8)),
}


@dataclass(frozen=True)
class Schedule:
    """Ascend from about 2 to about 7 bits per weight over a run: the Aquavit schedule.

    The target is B(s) = 8 - 6/(a + c*s) with s = step/total_steps ("hyperbolic"), or a straight
    line between the lowest and the highest level ("linear"); the level whose bpw is nearest to it
    is used, ties go up, and precision never descends.

    Attributes:
        total_steps: planned optimizer steps of the run.
        a: offset of the hyperbola.
        c: slope of the hyperbola.
        levels: "full18", "coarse9", "widths" or pairs (bits, block_size).
        curve: "hyperbolic" or "linear".
        pick: "nearest", "ceil" (lowest level at or above the target) or "floor".
        measure: "bpw" compares levels by payload and metadata, "payload" by payload bits alone
            (arms without granularity modulation).
        monotone: never descend, even where `total_steps` is extended on resume.

    Example:
        >>> Schedule(10_000).level(0)
        Level(bits=2, block_size=1024)

    Reference: Huang et al., "Aquavit", KDD '26, doi 10.1145/3770855.3818083; the grid between the
    published end points and the nearest-level rule are thinwire's.
    """

    total_steps: int
    a: float = field(default=0.9, kw_only=True)
    c: float = field(default=5.0, kw_only=True)
    levels: str | Sequence[tuple[int, int]] = field(default="full18", kw_only=True)
    curve: str = field(default="hyperbolic", kw_only=True)
    pick: str = field(default="nearest", kw_only=True)
    measure: str = field(default="bpw", kw_only=True)
    monotone: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ConfigError(f"total_steps must be at least 1, got {self.total_steps}")
        if self.a <= 0 or self.c < 0:
            raise ConfigError(f"the schedule needs a > 0 and c >= 0, got a={self.a}, c={self.c}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        _ = self.grid

    @cached_property
    def grid(self) -> tuple[Level, ...]:
        """Return the levels in ascending order of precision."""
        pairs = self.levels
        if isinstance(pairs, str):
            if pairs not in LEVEL_PRESETS:
                raise ConfigError(f"levels must be pairs or {sorted(LEVEL_PRESETS)}, got {pairs!r}")
            pairs = LEVEL_PRESETS[pairs]
        if not pairs:
            raise ConfigError("levels must hold at least one (bits, block_size)")
        return tuple(sorted((Level(*p) for p in pairs), key=self._value))

    def _value(self, level: Level) -> float:
        return level.bpw if self.measure == "bpw" else float(level.bits)

    def target(self, step: int) -> float:
        """Return the wanted bits per weight at `step`, before any rounding or clamp."""
        s = min(max(step / self.total_steps, 0.0), 1.0)
        if self.curve == "linear":
            low, high = self._value(self.grid[0]), self._value(self.grid[-1])
            return low + (high - low) * s
        return 8 - 6 / (self.a + self.c * s)

    def index(self, step: int, previous: int = -1) -> int:
        """Return the index in `grid` for optimizer step `step`, given the running index."""
        values = [self._value(level) for level in self.grid]
        target = min(max(self.target(step), values[0]), values[-1])
        if self.pick == "nearest":
            best = min(abs(v - target) for v in values)
            found = max(i for i, v in enumerate(values) if abs(v - target) <= best + _TIE)
        elif self.pick == "ceil":
            found = min(i for i, v in enumerate(values) if v >= target - _TIE)
        else:
            found = max(i for i, v in enumerate(values) if v <= target + _TIE)
        return max(previous, found) if self.monotone else found

    def level(self, step: int) -> Level:
        """Return the level of a run that reached `step` from 0."""
        return self.grid[self.index(step)]

    def codec(self, level: Level, layout: str = "split", meta: str = "fp16") -> Blockwise:
        """Return the codec of a level: shards are padded alike at all levels of the grid."""
        return Blockwise(
            bits=level.bits,
            block_size=level.block_size,
            layout=layout,
            meta=meta,
            pad_to=max(self.pad_to, level.block_size),
        )

    @property
    def pad_to(self) -> int:
        """Return the multiple that shards are padded to: the largest block of the grid."""
        return max(level.block_size for level in self.grid)


_CHOICES = {
    "curve": ("hyperbolic", "linear"),
    "pick": ("nearest", "ceil", "floor"),
    "measure": ("bpw", "payload"),
}


@dataclass(frozen=True)
class Static:
    """One codec for the whole run.

    Attributes:
        codec: how quantized weights travel.

    Example:
        >>> Static(Blockwise(bits=6, block_size=2048))
    """

    codec: Codec

    @property
    def bpw(self) -> float | None:
        """Return bits per weight on the wire, where the codec states them."""
        return self.codec.bits_per_weight if isinstance(self.codec, Blockwise) else None


@dataclass(frozen=True)
class Difference:
    """Send the quantized change of the weights since the last gather (a rival arm).

    Every rank then keeps a full fp32 copy of the weights.

    Attributes:
        codec: how differences travel.

    Reference: SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526).
    """

    codec: Codec

    @property
    def bpw(self) -> float | None:
        """Return bits per weight on the wire, where the codec states them."""
        return Static(self.codec).bpw
