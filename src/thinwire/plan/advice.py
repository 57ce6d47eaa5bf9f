"""One recommendation out of predicted arms: the fastest that pays, per link and together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.plan.predict import PAYS, Arm, Prediction, compare

__all__ = ["Advice", "advise"]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to run.

    Attributes:
        dense: the uncompressed run.
        arms: every arm beside it, the fastest first.
        chosen: names of the arms to combine, one per link; empty: stay dense.
        best: their prediction together, or the dense one.
        words: the recommendation for people, one sentence.
    """

    dense: Prediction
    arms: tuple[Arm, ...]
    chosen: tuple[str, ...]
    best: Prediction
    words: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "dense": self.dense.to_dict(),
            "arms": [arm.to_dict() for arm in self.arms],
            "recommended": list(self.chosen),
            "prediction": self.best.to_dict(),
            "words": self.words,
        }


def advise(
    dense: Prediction,
    arms: Mapping[str, tuple[str, Prediction]],
    together: Callable[[Sequence[str]], Prediction | None],
) -> Advice:
    """Choose among arms.

    Args:
        dense: the uncompressed run.
        arms: name -> (the link that it concerns, its prediction).
        together: predicts several arms of different links in one run; None where they exclude
            each other.

    Returns:
        The fastest arm of each link that pays by more than 5 %, together if that is fastest.

    Raises:
        ConfigError: no arm is given.
    """
    if not arms:
        raise ConfigError("no arm fits this mesh: nothing to compress crosses between its ranks")
    found = compare(dense, [prediction for _, prediction in arms.values()])
    ordered = tuple(sorted(found, key=lambda arm: arm.prediction.step_s))
    best_of: dict[str, str] = {}
    for arm in ordered:
        name = arm.prediction.name
        if arm.pays:
            best_of.setdefault(arms[name][0], name)
    chosen = tuple(best_of.values())
    if not chosen:
        return Advice(
            dense=dense, arms=ordered, chosen=(), best=dense, words=_stay(dense, ordered[0])
        )
    best = arms[chosen[0]][1]
    if len(chosen) > 1:
        joint = together(chosen)
        if joint is not None and joint.step_s < best.step_s:
            best = joint
    if best.name == chosen[0]:
        chosen = chosen[:1]
    words = f"use {' with '.join(chosen)}: {dense.step_s / best.step_s:.2f}x the dense speed"
    return Advice(dense=dense, arms=ordered, chosen=chosen, best=best, words=words)


def _stay(dense: Prediction, nearest: Arm) -> str:
    gain = f"the best arm, {nearest.prediction.name}, {nearest.words}"
    return f"stay dense: nothing is faster by more than {PAYS - 1:.0%}; {gain}"
