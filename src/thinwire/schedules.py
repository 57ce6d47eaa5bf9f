"""Schedules of learning rate and density: step -> value, floats only."""

import math
from dataclasses import dataclass
from typing import Protocol

from thinwire.errors import ConfigError

__all__ = ["Constant", "Density", "Schedule", "WarmupCosine"]


class Schedule(Protocol):
    """A value that depends on the step alone, so that a resumed run continues it exactly."""

    def __call__(self, step: int) -> float:
        """Return the value for `step`, counted from 0."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Linear warm-up over `warmup_steps`, then `peak` for ever.

    Attributes:
        peak: the value after warm-up.
        warmup_steps: steps of the ramp; step 0 already has peak / warmup_steps.
    """

    peak: float
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)

    def __call__(self, step: int) -> float:
        """Return the value for `step`, counted from 0."""
        return self.peak * _ramp(step, self.warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosine:
    """Linear warm-up, then half a cosine from `peak` down to `peak * floor` at the last step.

    Attributes:
        peak: the value at the end of warm-up.
        total_steps: steps of the run; the value stays at the floor beyond.
        warmup_steps: steps of the ramp.
        floor: last value over peak, in [0, 1].

    Example:
        >>> WarmupCosine(peak=1.0, total_steps=11, warmup_steps=0, floor=0.0)(5)
        0.5000000000000001
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        if self.total_steps < 1:
            raise ConfigError(f"total_steps must be at least 1, got {self.total_steps}")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"floor must lie in [0, 1], got {self.floor}")

    def __call__(self, step: int) -> float:
        """Return the value for `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * _ramp(step, self.warmup_steps)
        span = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.floor + (1.0 - self.floor) * cosine)


@dataclass(frozen=True)
class Density:
    """Fraction of elements that is sent: all at first, then a geometric ramp down to `target`.

    1.0 for steps 0..W, then target^((step - W)/R) over R ramp steps, then target.

    Attributes:
        target: density after the ramp, in (0, 1].
        warmup_steps: W, dense steps after the first one, which is always dense.
        ramp_steps: R, steps of the ramp.

    Example:
        >>> [round(Density(0.01, ramp_steps=4)(step), 6) for step in range(6)]
        [1.0, 0.316228, 0.1, 0.031623, 0.01, 0.01]
    """

    target: float
    warmup_steps: int = 0
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.target <= 1.0:
            raise ConfigError(f"density must lie in (0, 1], got {self.target}")
        _check_warmup(self.warmup_steps)
        if self.ramp_steps < 0:
            raise ConfigError(f"ramp_steps must not be negative, got {self.ramp_steps}")

    def __call__(self, step: int) -> float:
        """Return the density of `step`, counted from 0."""
        if step <= self.warmup_steps:
            return 1.0
        into = step - self.warmup_steps
        return self.target if into >= self.ramp_steps else self.target ** (into / self.ramp_steps)


def _ramp(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps must not be negative, got {warmup_steps}")
