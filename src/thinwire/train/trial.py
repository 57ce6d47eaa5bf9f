"""Real steps before a run: what the dense ones take beyond the probe, and arms put to the test.

Weights are thrown away afterwards. All functions are collective: ranks count and time alike.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import plan

__all__ = ["calibrated_s", "try_arms"]

Build = Callable[[], Callable[[], Any]]
MIN_STEPS, MAX_STEPS = 3, 10


def calibrated_s(
    links: plan.Links, dense: plan.Workload, build: Build, seconds: float
) -> float | None:
    """Return the seconds of computation that explain what real dense steps took.

    None where fewer than three steps fit into `seconds`: there the link decides, and trying arms
    would compare what they take with a dense step that was not taken.
    """
    assert links.compute is not None
    probed_s = links.compute.step_s
    expected_s = plan.predict(dense, plan.MeasuredCosts(links, dense.mesh, probed_s)).step_s
    took = timed_steps(build, expected_s, seconds)
    if not took:
        return None
    beyond_s = statistics.median(took) - expected_s
    return max(probed_s + beyond_s, probed_s / 10)


def try_arms(
    choice: plan.Choice, build: Callable[[str], Callable[[], Any]], seconds: float
) -> plan.Choice:
    """Return a choice that real steps have confirmed, as far as they fit into `seconds`.

    Arms are tried from the fastest prediction on, until one that was tried is faster than all
    predictions that are left.

    Args:
        choice: by predictions.
        build: from an arm's name to a function that takes a step with it; its first steps are
            those of the first phase after the dense steps.
        seconds: how long it may take.
    """
    tried: dict[str, float] = {}
    end, best_s = time.perf_counter() + seconds, float("inf")
    for arm in choice.arms:
        name, predicted_s = arm.prediction.name, arm.prediction.step_s
        if arm.speedup <= 1 + choice.margin or predicted_s >= best_s:
            break
        expected_s = choice.first_s(arm.prediction)
        (left_s,) = _largest([end - time.perf_counter()])
        took = timed_steps(lambda name=name: build(name), expected_s, left_s)  # type: ignore[misc]
        if not took:
            break
        tried[name] = statistics.median(took) / expected_s
        best_s = min(best_s, tried[name] * predicted_s)
    return choice.revised(tried)


def timed_steps(build: Build, expected_s: float, seconds: float) -> list[float]:
    """Return the slowest rank's seconds of real steps, none where three would not fit.

    Args:
        build: makes what takes a step.
        expected_s: of a step, to foresee how many fit.
        seconds: how long all may take.
    """
    (count,) = _largest([min(MAX_STEPS, seconds / expected_s)])
    if count < MIN_STEPS:
        return []
    step = build()
    step()  # compiles and opens sockets
    took = []
    for _ in range(int(count) - 1):
        dist.barrier()
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    del step
    gc.collect()  # FSDP's cycles hold the weights
    return _largest(took)


def _largest(values: Sequence[float]) -> list[float]:
    """Return the largest of every rank's values, so that all ranks count alike."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.tolist()
