"""Step time, scaling and hours of a run over numbers of ranks and link speeds; deterministic.

Stragglers: every rank's computation varies from step to step around its mean, normally with a
relative deviation `jitter`, and a rank is slow, by `slow_factor`, with probability `slow_share`.
A step waits for the slowest of R ranks: with z = Phi^-1((R - 3/8) / (R + 1/4)), Blom's estimate of
the largest of R normal values, and p = 1 - (1 - slow_share)^R, computation stretches by

    (1 - p) * (1 + jitter * z) + p * max(1 + jitter * z, slow_factor)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from thinwire.errors import ConfigError
from thinwire.plan.predict import Prediction, predict
from thinwire.plan.workload import Costs, Workload

__all__ = ["MAX_RANKS", "Stragglers", "Sweep", "sweep"]

MAX_RANKS = 1_000_000
_RANGES = (("jitter", 0.0, 1e6), ("slow_share", 0.0, 1.0), ("slow_factor", 1.0, 1e6))
# Workload and costs of a place of a sweep: ranks, or a link's Gbit/s.
Make = Callable[[float], tuple[Workload, Costs]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers:
    """How ranks differ; see the module.

    Attributes:
        jitter: relative deviation of a rank's computation.
        slow_share: probability that a rank is slow.
        slow_factor: by how much.
    """

    jitter: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"stragglers: {name} ({flag}) must lie between {low:g} and {high:g}, got "
                    f"{value}"
                )

    def slowdown(self, num_ranks: int) -> float:
        """Return the factor on the computation of the slowest of `num_ranks`."""
        usual = 1.0
        if self.jitter and num_ranks > 1:
            z = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
            usual += self.jitter * z
        hit = 1 - (1 - self.slow_share) ** num_ranks
        return (1 - hit) * usual + hit * max(usual, self.slow_factor)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One arm over numbers of ranks or link speeds, as lists over the places.

    Attributes:
        name: the arm.
        at: ranks, or Gbit/s.
        step_s: seconds of a step.
        compute_s: arithmetic and its stragglers.
        coding_s: encoding and decoding.
        waiting_s: waiting for messages and other stages.
        tokens_per_s: of all ranks.
        efficiency: tokens per second and rank over the first place's.
        hours: of the whole run; empty where its tokens are not given.
        sent_bytes: of a rank and step.
        memory_bytes: of a rank, an estimate.
    """

    name: str
    at: tuple[float, ...]
    step_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    coding_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    efficiency: tuple[float, ...]
    hours: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def sweep(
    name: str,
    places: Sequence[float],
    make: Make,
    *,
    total_tokens: float | None = None,
    stragglers: Stragglers | None = None,
    compute_scale: float = 1.0,
) -> Sweep:
    """Predict a run at each place.

    Args:
        name: of the arm.
        places: ranks or link speeds, ascending.
        make: place -> workload and costs.
        total_tokens: of the whole run, for its hours; None: no hours.
        stragglers: how ranks differ; None: not at all.
        compute_scale: of the slowest site's computation.

    Raises:
        ConfigError: no place, or one that the run cannot be at; tokens of less than one step.
    """
    if not places:
        raise ConfigError("nothing to simulate: give at least one number of ranks and link speed")
    if total_tokens is not None and not 0 < total_tokens < math.inf:
        raise ConfigError(f"tokens must be above 0 and finite, got {total_tokens}")
    slow = stragglers or Stragglers()
    found: list[tuple[Workload, Prediction]] = []
    for place in places:
        workload, costs = make(place)
        if total_tokens is not None and total_tokens < workload.tokens:
            raise ConfigError(
                f"tokens {total_tokens:g} are less than one step of {workload.tokens} on "
                f"{workload.num_ranks} ranks: give more (--tokens), or fewer ranks"
            )
        slowdown = compute_scale * slow.slowdown(workload.num_ranks)
        found.append((workload, predict(workload, costs, slowdown=slowdown)))
    first_workload, first = found[0]
    base = first.tokens_per_s / first_workload.num_ranks
    timed = found if total_tokens is not None else []
    return Sweep(
        name=name,
        at=tuple(float(place) for place in places),
        step_s=tuple(p.step_s for _, p in found),
        compute_s=tuple(p.compute_s for _, p in found),
        coding_s=tuple(p.coding_s for _, p in found),
        waiting_s=tuple(p.waiting_s + p.bubble_s for _, p in found),
        tokens_per_s=tuple(p.tokens_per_s for _, p in found),
        efficiency=tuple(p.tokens_per_s / w.num_ranks / base for w, p in found),
        hours=tuple((total_tokens or 0.0) / p.tokens_per_s / 3600 for _, p in timed),
        sent_bytes=tuple(sum(p.sent_bytes.values()) for _, p in found),
        memory_bytes=tuple(sum(p.memory_bytes.values()) for _, p in found),
    )
