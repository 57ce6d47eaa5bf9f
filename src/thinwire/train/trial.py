"""Real steps before a run: what the dense ones take beyond the probe, and arms put to the test.

Weights are thrown away afterwards. All functions are collective: ranks count and time alike.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire import plan
from thinwire.plan.choose import corrected_s, first_s

__all__ = ["Steps", "calibrated_s", "try_arms"]

MIN_STEPS, MAX_STEPS = 3, 10


class Steps(Protocol):
    """A trainer."""

    def train_step(self) -> Any:
        """Take a step."""

    def close(self) -> None:
        """Wait for what is on its way, end threads."""


def calibrated_s(
    links: plan.Links, dense: plan.Workload, build: Callable[[], Steps], seconds: float
) -> float | None:
    """Return the seconds of computation that explain what real dense steps took.

    None where fewer than three steps fit into `seconds`: there the link decides, and trying arms
    would compare what they take with a dense step that was not taken.
    """
    assert links.compute is not None
    probed_s = links.compute.step_s
    prediction = plan.predict(dense, plan.MeasuredCosts(links, dense.mesh, probed_s))
    expected_s = first_s(prediction)
    took = _timed_steps(build, expected_s, seconds)
    if not took:
        return None
    beyond_s = statistics.median(took) - expected_s
    return max(probed_s + beyond_s, probed_s / 10)


def try_arms(choice: plan.Choice, build: Callable[[str], Steps], seconds: float) -> plan.Choice:
    """Return a choice that real steps have confirmed, as far as they fit into `seconds`.

    Arms are tried from the fastest prediction on, until one that was tried is faster than all
    predictions that are left.

    Args:
        choice: by predictions.
        build: from an arm's name to what takes steps with it, no dense ones at first.
        seconds: how long it may take.
    """
    tried: dict[str, float] = {}
    end, best_s = time.perf_counter() + seconds, float("inf")
    for arm in choice.arms:
        found = arm.prediction
        if arm.speedup <= 1 + choice.margin or found.step_s >= best_s:
            break
        (left_s,) = _largest([end - time.perf_counter()])
        took = _timed_steps(lambda name=found.name: build(name), first_s(found), left_s)  # type: ignore[misc]
        if not took:
            break
        tried[found.name] = statistics.median(took)
        best_s = min(best_s, corrected_s(found, tried[found.name]))
    return choice.revised(tried)


def _timed_steps(build: Callable[[], Steps], expected_s: float, seconds: float) -> list[float]:
    """Return the slowest rank's seconds of real steps, none where three would not fit.

    Steps that take longer than expected end when their time is up; one at least is timed.

    Args:
        build: makes what takes the steps.
        expected_s: of a step, to foresee how many fit.
        seconds: how long all may take, but for the building.
    """
    (count,) = _largest([min(MAX_STEPS, seconds / expected_s)])
    if count < MIN_STEPS:
        return []
    steps = build()
    took: list[float] = []
    begun = time.perf_counter()
    _seconds_of(steps)  # compiles and opens sockets
    for _ in range(int(count) - 1):
        # All ranks begin together, and stop together.
        (elapsed_s,) = _largest([time.perf_counter() - begun])
        if took and elapsed_s > seconds:
            break
        took.append(_seconds_of(steps))
    steps.close()
    del steps
    gc.collect()  # FSDP's cycles hold the weights
    return _largest(took)


def _seconds_of(steps: Steps) -> float:
    start = time.perf_counter()
    steps.train_step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the optimizer's kernels are only launched by then
    return time.perf_counter() - start


def _largest(values: Sequence[float]) -> list[float]:
    """Return the largest of every rank's values, so that all ranks count alike."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.tolist()
