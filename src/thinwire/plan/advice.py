"""One recommendation out of predicted arms: the fastest that pays, per link and together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        memory_limit: bytes of a device that a run must fit, 0: not asked.
        words: the recommendation for people, one sentence.
        notes: what else to know: arms that could not be weighed, times that are extrapolated.
    """

    dense: Prediction
    arms: tuple[Arm, ...]
    chosen: tuple[str, ...]
    best: Prediction
    words: str
    memory_limit: float = 0.0
    notes: tuple[str, ...] = ()

    def fits(self, prediction: Prediction) -> bool:
        """Return whether a run fits a device's memory."""
        return _fits(prediction, self.memory_limit)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "dense": self.dense.to_dict(),
            "arms": [arm.to_dict() | {"fits": self.fits(arm.prediction)} for arm in self.arms],
            "recommended": list(self.chosen),
            "prediction": self.best.to_dict(),
            "words": self.words,
            "notes": list(self.notes),
        }


def advise(
    dense: Prediction,
    arms: Mapping[str, tuple[str, Prediction]],
    together: Callable[[Sequence[str]], Prediction | None],
    memory_limit: float = 0.0,
) -> Advice:
    """Choose among arms.

    Args:
        dense: the uncompressed run.
        arms: name -> (the link that it concerns, its prediction); link "" stands for several: such
            an arm is not combined with others.
        together: predicts several arms of different links in one run; None where they exclude
            each other.
        memory_limit: bytes of a device; arms that need more are never chosen. 0: not asked.

    Returns:
        The fastest arm of each link that pays by more than 5 %, together if that is fastest; where
        the dense run does not fit, the fastest arm that does.

    Raises:
        ConfigError: no arm is given.
    """
    if not arms:
        raise ConfigError("no arm fits this mesh: nothing to compress crosses between its ranks")
    found = compare(dense, [prediction for _, prediction in arms.values()])
    limit = memory_limit
    ordered = tuple(
        _within(arm, limit) for arm in sorted(found, key=lambda arm: arm.prediction.step_s)
    )
    fitting = [arm for arm in ordered if _fits(arm.prediction, limit)]
    best_of: dict[str, str] = {}
    for arm in fitting:
        name = arm.prediction.name
        if arm.pays:
            best_of.setdefault(arms[name][0], name)
    alone = best_of.pop("", None)
    chosen = tuple(best_of.values()) or ((alone,) if alone else ())
    dense_fits = _fits(dense, limit)
    if not chosen and fitting and not dense_fits:
        chosen = (fitting[0].prediction.name,)
    if not chosen:
        words = _stay(fitting or ordered) if dense_fits else _nothing(dense, ordered, limit)
        return Advice(
            dense=dense, arms=ordered, chosen=(), best=dense, words=words, memory_limit=limit
        )
    chosen, best = _join(arms, chosen, alone, together, limit)
    words = f"use {' with '.join(chosen)}: {dense.step_s / best.step_s:.2f}x the dense speed"
    if not dense_fits:
        words += f"; the dense run {_too_large(dense, limit)}"
    return Advice(
        dense=dense, arms=ordered, chosen=chosen, best=best, words=words, memory_limit=limit
    )


def _join(
    arms: Mapping[str, tuple[str, Prediction]],
    chosen: tuple[str, ...],
    alone: str | None,
    together: Callable[[Sequence[str]], Prediction | None],
    limit: float,
) -> tuple[tuple[str, ...], Prediction]:
    """Return the fastest of the first arm, all of them together, and the arm that stands alone."""
    best = arms[chosen[0]][1]
    joint = together(chosen) if len(chosen) > 1 else None
    if joint is not None and joint.step_s < best.step_s and _fits(joint, limit):
        best = joint
    else:
        chosen = chosen[:1]
    if alone and arms[alone][1].step_s < best.step_s:
        return (alone,), arms[alone][1]
    return chosen, best


def _fits(prediction: Prediction, limit: float) -> bool:
    return not limit or sum(prediction.memory_bytes.values()) <= limit


def _too_large(prediction: Prediction, limit: float) -> str:
    need = sum(prediction.memory_bytes.values())
    return f"does not fit, needing about {need / 1e9:.3g} GB of a device's {limit / 1e9:.3g} GB"


def _within(arm: Arm, limit: float) -> Arm:
    """Return the arm, its words led by its memory where it does not fit."""
    if _fits(arm.prediction, limit):
        return arm
    return replace(arm, words=f"{_too_large(arm.prediction, limit)}; otherwise it {arm.words}")


def _stay(arms: Sequence[Arm]) -> str:
    gain = f"the best arm, {arms[0].prediction.name}, {arms[0].words}"
    return f"stay dense: nothing is faster by more than {PAYS - 1:.0%}; {gain}"


def _nothing(dense: Prediction, arms: Sequence[Arm], limit: float) -> str:
    least = min([dense, *(arm.prediction for arm in arms)],
                key=lambda p: sum(p.memory_bytes.values()))  # fmt: skip
    return f"nothing fits: even {least.name} {_too_large(least, limit)}; add devices"
