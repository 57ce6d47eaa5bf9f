"""Choose between the dense run and compressed arms by their predicted step times.

Rank 0 predicts and chooses; the others take its choice, since ranks that chose for themselves could
differ by a rounding and then wait for each other's messages for ever.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.plan.links import Links
from thinwire.plan.measured import MeasuredCosts
from thinwire.plan.predict import PAYS, Arm, Prediction, compare, predict
from thinwire.plan.workload import DENSE_STEP, SYNC, Workload

__all__ = ["OFF", "Choice", "Measured", "choose", "corrected_s", "first_s"]

# Relative difference from which a prediction counts as off.
OFF = 0.2


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen among which arms.

    Attributes:
        chosen: the chosen run's prediction.
        dense: the dense run's.
        arms: the compressed runs beside it, the fastest first.
        margin: speed-up that an arm had to exceed, less 1.
        tried: arms that took real steps -> measured seconds of one, see `revised`.
    """

    chosen: Prediction
    dense: Prediction
    arms: tuple[Arm, ...]
    margin: float
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the chosen run's name."""
        return self.chosen.name

    @property
    def step_s(self) -> float:
        """Return the chosen run's seconds a step, as trials corrected them."""
        if self.name not in self.tried:
            return self.chosen.step_s
        return corrected_s(self.chosen, self.tried[self.name])

    @property
    def speedup(self) -> float:
        """Return the dense step's seconds over the chosen one's."""
        return self.dense.step_s / self.step_s

    def revised(self, tried: Mapping[str, float]) -> "Choice":
        """Return the choice between the dense run and the arms that took real steps, if any did.

        Args:
            tried: arm -> measured seconds of a step that is neither dense nor the end of a round.
        """
        if not tried:
            return self
        steps = {
            arm.prediction.name: corrected_s(arm.prediction, tried[arm.prediction.name])
            for arm in self.arms
            if arm.prediction.name in tried
        }
        best = min(steps, key=steps.__getitem__)
        chosen = self.dense
        if self.dense.step_s > (1 + self.margin) * steps[best]:
            chosen = next(a.prediction for a in self.arms if a.prediction.name == best)
        return replace(self, chosen=chosen, tried=dict(tried))

    def words(self) -> str:
        """Return what was chosen and the expected gain, in one line."""
        dense_s = self.dense.step_s
        if self.chosen is not self.dense:
            small = "" if self.speedup > PAYS else ", a small gain"
            found = "tried," if self.name in self.tried else "expected"
            return (
                f"chose {self.name}: {found} {self.step_s:.4g} s a step against "
                f"{dense_s:.4g} s dense, {self.speedup:.2f}x{small}"
            )
        head = f"chose {self.name}: expected {dense_s:.4g} s a step"
        if self.tried:
            took = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in self.tried.items())
            return f"{head}; no arm that was tried is faster: {took}"
        if not self.arms:
            return f"{head}; no arm fits"
        best = self.arms[0]
        return f"{head}; the best arm, {best.prediction.name}, {best.words}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: names, predictions, gains."""
        return {
            "chosen": self.name,
            "expected_step_s": self.step_s,
            "expected_speedup": self.speedup,
            "margin": self.margin,
            "tried": dict(self.tried),
            "dense": self.dense.to_dict(),
            "arms": [arm.to_dict() for arm in self.arms],
        }

    def expected_s(self, step: int, steps: int) -> float:
        """Return the predicted seconds of the step that follows `step` finished ones of `steps`.

        Phases follow each other over the run, dense steps first; those that recur (the ends of
        rounds) count with their share in every step.
        """
        phases = self.chosen.phases
        if not phases or self.recurs:
            return self.step_s
        # Sorting is stable: other phases keep the order in which they come.
        ordered = sorted(phases.items(), key=lambda item: DENSE_STEP not in item[0])
        beyond_s = self.tried.get(self.name, first_s(self.chosen)) - first_s(self.chosen)
        end = 0.0
        for name, (share, seconds) in ordered:
            end += share
            if (step + 0.5) / steps < end or name == ordered[-1][0]:
                return seconds if DENSE_STEP in name else seconds + beyond_s
        raise AssertionError("phases are not empty")

    @property
    def recurs(self) -> bool:
        """Return whether some steps end a round."""
        return any(SYNC in name for name in self.chosen.phases)


def first_s(prediction: Prediction) -> float:
    """Return the seconds of an arm's first step, dense ones and the ends of rounds left out."""
    for name, (_, seconds) in prediction.phases.items():
        if DENSE_STEP not in name and SYNC not in name:
            return seconds
    return prediction.step_s


def corrected_s(prediction: Prediction, measured_s: float) -> float:
    """Return the mean seconds of a step where the first that isn't dense took `measured_s`.

    What it took beyond its prediction is counted for all steps but dense ones.
    """
    dense = sum(share for name, (share, _) in prediction.phases.items() if DENSE_STEP in name)
    return prediction.step_s + (1 - dense) * (measured_s - first_s(prediction))


def choose(
    links: Links,
    dense: Workload,
    arms: Sequence[Workload],
    *,
    margin: float = 0.02,
    step_s: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Choice:
    """Predict the dense run and the arms over probed links and choose the fastest.

    Collective over `group` where a process group is initialized: all ranks return rank 0's choice.

    Args:
        links: what `probe` measured.
        dense: the uncompressed run.
        arms: compressed runs over the same mesh, names unlike each other.
        margin: an arm must be faster than the dense run by more than this share. Less than what
            `plan` calls paying (5 %): a run that has to choose takes small gains too.
        step_s: seconds of a step's computation; None takes the probe's.
        group: ranks that choose together; None: all.

    Raises:
        ConfigError: on every rank alike: a negative margin, an arm of another mesh, links that do
            not cover an arm.

    Example:
        >>> choice = tw.plan.choose(links, dense, [aquavit, zeropp])
        >>> choice.name, choice.speedup
    """
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    if alone:
        return _choose(links, dense, arms, margin, step_s)
    found: list[Any] = [None, ""]
    if dist.get_rank(group) == 0:
        try:
            found[0] = _choose(links, dense, arms, margin, step_s)
        except ConfigError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, group=group, group_src=0)
    choice, refusal = found
    if refusal:
        raise ConfigError(refusal)
    return choice


def _choose(
    links: Links,
    dense: Workload,
    arms: Sequence[Workload],
    margin: float,
    step_s: float | None,
) -> Choice:
    if not margin >= 0:
        raise ConfigError(f"margin must be at least 0, got {margin}")
    names = [dense.name, *(arm.name for arm in arms)]
    if len(set(names)) < len(names):
        raise ConfigError(f"arms to choose among need names unlike each other, got {names}")
    costs = MeasuredCosts(links, dense.mesh, step_s)
    for arm in arms:
        if arm.mesh != dense.mesh:
            raise ConfigError(f"arm {arm.name} has another mesh than {dense.name}")
    base = predict(dense, costs)
    found = compare(base, [predict(arm, costs) for arm in arms])
    ordered = sorted(found, key=lambda arm: arm.prediction.step_s)
    best = ordered[0] if ordered and ordered[0].speedup > 1 + margin else None
    return Choice(
        chosen=best.prediction if best else base, dense=base, arms=tuple(ordered), margin=margin
    )


@dataclass
class Measured:
    """Step times of a run beside those that its choice expected.

    Attributes:
        choice: the run's choice.
        steps: of the whole run.
        skip: first steps that don't count: they compile kernels and open sockets.
        least: steps before a verdict.
    """

    choice: Choice
    steps: int
    skip: int = 3
    least: int = 10
    _pairs: list[tuple[float, float]] = field(default_factory=list, init=False)
    _seen: int = field(default=0, init=False)
    _said: bool = field(default=False, init=False)

    def add(self, step: int, seconds: float) -> str | None:
        """Count a step; return one line, once, when the prediction turns out to be off.

        Args:
            step: finished steps, this one included.
            seconds: it took.
        """
        self._seen += 1
        if self._seen <= self.skip:
            return None
        self._pairs.append((seconds, self.choice.expected_s(step - 1, self.steps)))
        if self._said or len(self._pairs) % self.least:
            return None
        ratio = self.ratio
        assert ratio is not None
        if abs(ratio - 1) <= OFF:
            return None
        self._said = True
        side = "more" if ratio > 1 else "less"
        return (
            f"the prediction is off: steps of {self.choice.name} take {abs(ratio - 1):.0%} {side} "
            f"than expected ({ratio * self.choice.step_s:.4g} s against "
            f"{self.choice.step_s:.4g} s)"
        )

    @property
    def ratio(self) -> float | None:
        """Return measured over expected seconds, None before any step counted.

        The median over steps; where some steps end a round, the ratio of sums.
        """
        if not self._pairs:
            return None
        if self.choice.recurs:
            return sum(s for s, _ in self._pairs) / sum(e for _, e in self._pairs)
        return statistics.median(seconds / expected for seconds, expected in self._pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        ratio = self.ratio
        return {
            "steps": len(self._pairs),
            "step_s_median": statistics.median(s for s, _ in self._pairs) if self._pairs else None,
            "over_expected": ratio,
            "off": ratio is not None and abs(ratio - 1) > OFF,
        }
