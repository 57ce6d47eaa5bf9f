"""Predicted step times: `predict` one workload, `compare` arms with the dense one, say if it pays.

Break-even speed, as `benchmarks/break_even.py` measures it: an arm saves (dense - wire) bytes and
costs its coding, so with nothing overlapped it pays on links slower than

    break-even rate = 8 * (dense_bytes - wire_bytes) / (extra seconds)    [bit/s]

the extra seconds being encoding, decoding and the arm's own passes over its state.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.errors import ConfigError
from thinwire.plan.timeline import Timeline, play
from thinwire.plan.workload import Costs, Workload

__all__ = [
    "PAYS",
    "Arm",
    "Prediction",
    "break_even_bits_per_s",
    "compare",
    "crossing",
    "predict",
    "seconds_text",
]

# Speed-up over dense from which an arm is said to pay.
PAYS = 1.05


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's seconds, bytes and memory on one rank, averaged over the run.

    Attributes:
        name: the arm.
        step_s: seconds of a step.
        compute_s: of arithmetic.
        encode_s: of encoding.
        decode_s: of decoding.
        exposed_s: waited for messages, per link.
        bubble_s: waited for other pipeline stages.
        busy_s: messages on the wire, per link, hidden ones too.
        sent_bytes: per link, by the ledger's formulas.
        dense_bytes: what uncompressed collectives would have sent, per link.
        memory_bytes: by what they hold.
        tokens_per_s: of the whole run.
        phases: name -> (share, seconds of a step).
    """

    name: str
    step_s: float
    compute_s: float
    encode_s: float
    decode_s: float
    exposed_s: Mapping[str, float]
    bubble_s: float
    busy_s: Mapping[str, float]
    sent_bytes: Mapping[str, float]
    dense_bytes: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    tokens_per_s: float
    phases: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def coding_s(self) -> float:
        """Return seconds of encoding and decoding."""
        return self.encode_s + self.decode_s

    @property
    def waiting_s(self) -> float:
        """Return seconds waited for messages on all links."""
        return sum(self.exposed_s.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def predict(workload: Workload, costs: Costs, *, slowdown: float = 1.0) -> Prediction:
    """Predict a workload on given hardware.

    Args:
        workload: of `thinwire.plan.workload_of(job)`, or of a trainer's configuration
            (`thinwire.train.workload`).
        costs: a described cluster (`ClusterCosts`) or measured links (`MeasuredCosts`).
        slowdown: of the slowest rank's computation, which all wait for.

    Raises:
        ConfigError: costs that don't cover the workload.

    Example:
        >>> costs = tw.plan.MeasuredCosts(tw.plan.Links.read("links.json"), job.mesh)
        >>> tw.plan.predict(tw.plan.workload_of(job), costs).step_s
    """
    if not 1 <= slowdown < math.inf:
        raise ConfigError(f"slowdown must be at least 1 and finite, got {slowdown}")
    whole, phases = Timeline(), {}
    for phase in workload.phases:
        timeline = play(phase.ops, costs, workload, slowdown=slowdown)
        whole.add(timeline, phase.share)
        phases[phase.name] = (phase.share, timeline.step_s)
    return Prediction(
        name=workload.name,
        **asdict(whole),
        sent_bytes=workload.sent(),
        dense_bytes=workload.sent(dense=True),
        memory_bytes=dict(workload.memory),
        tokens_per_s=workload.tokens / whole.step_s if whole.step_s else 0.0,
        phases=phases,
    )


def break_even_bits_per_s(saved_bytes: float, extra_s: float) -> float | None:
    """Return the link speed below which an arm pays, nothing overlapped.

    Args:
        saved_bytes: dense minus wire bytes of a step.
        extra_s: seconds that the arm adds to the step.

    Returns:
        Bits per second; None where it saves nothing; infinity where it costs nothing.
    """
    if saved_bytes <= 0:
        return None
    return 8 * saved_bytes / extra_s if extra_s > 0 else float("inf")


def crossing(
    speedup: Callable[[float], float], low: float, high: float, steps: int = 12
) -> float | None:
    """Return the link speed at which a speed-up falls to 1, messages overlapped as they are.

    Args:
        speedup: of an arm at a link speed; falls as links get faster.
        low: slowest link asked about, above 0.
        high: fastest.
        steps: halvings of the range, in logarithms.

    Returns:
        The speed; None where the arm is no faster even at `low`, infinity where it still is at
        `high`.
    """
    if speedup(low) <= 1:
        return None
    if speedup(high) > 1:
        return float("inf")
    for _ in range(steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if speedup(middle) > 1 else (low, middle)
    return (low * high) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm beside the dense run.

    Attributes:
        prediction: of the arm.
        speedup: dense step over this one.
        break_even_bits_per_s: see `break_even_bits_per_s`; on a described cluster whose messages
            overlap, the speed of its slowest link at which both take equally long (`crossing`).
        pays: faster than dense by more than 5 %.
        words: why, for people.
    """

    prediction: Prediction
    speedup: float
    break_even_bits_per_s: float | None
    pays: bool
    words: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite break-even speed is null."""
        rate = self.break_even_bits_per_s
        finite = rate if rate is not None and rate != float("inf") else None
        return self.prediction.to_dict() | {
            "speedup": self.speedup,
            "break_even_bits_per_s": finite,
            "pays": self.pays,
            "words": self.words,
        }


def compare(dense: Prediction, arms: Sequence[Prediction]) -> list[Arm]:
    """Return each arm beside the dense run, with the reason why it pays or doesn't."""
    return [_arm(dense, arm) for arm in arms]


def _arm(dense: Prediction, arm: Prediction) -> Arm:
    saved = sum(dense.sent_bytes.values()) - sum(arm.sent_bytes.values())
    extra = arm.coding_s + max(0.0, arm.compute_s - dense.compute_s)
    speedup = dense.step_s / arm.step_s
    return Arm(
        prediction=arm,
        speedup=speedup,
        break_even_bits_per_s=break_even_bits_per_s(saved, extra),
        pays=speedup > PAYS,
        words=_why(dense, arm, saved, speedup),
    )


def _why(dense: Prediction, arm: Prediction, saved: float, speedup: float) -> str:
    own = max(0.0, arm.compute_s - dense.compute_s)
    extra = arm.coding_s + own
    won = dense.waiting_s + dense.bubble_s - arm.waiting_s - arm.bubble_s
    share = dense.waiting_s / dense.step_s
    less = seconds_text(max(won, 0.0))
    if speedup > PAYS:
        return f"pays: {speedup:.2f}x, {less} less waiting for {_work(arm, own)} in a step"
    head = f"does not pay ({speedup:.2f}x): "
    if saved <= 0:
        return head + "it sends no fewer bytes here"
    hidden = sum(dense.busy_s.values()) - dense.waiting_s
    if share < 1 - 1 / PAYS:
        if hidden > dense.waiting_s:
            return head + (
                f"messages already fly beneath the computation; only {share:.0%} of the dense step "
                "waits for them"
            )
        return head + f"the link is fast: {share:.0%} of the dense step waits for messages"
    expected = dense.waiting_s * saved / max(sum(dense.sent_bytes.values()), 1.0)
    if won <= extra:
        if won < 0.1 * expected and arm.waiting_s > extra:
            return head + (
                f"it sends fewer bytes but still waits {seconds_text(arm.waiting_s)} of a step of "
                f"{seconds_text(arm.step_s)} for messages, {seconds_text(dense.waiting_s)} dense: "
                "its collectives take at least as long on this link"
            )
        if arm.coding_s < own:
            return head + f"{_work(arm, own)} in a step save {less} of waiting"
        return head + (
            f"coding takes {seconds_text(arm.coding_s)} of a step and saves {less} of waiting: the "
            "link is too fast for this codec on this device"
        )
    if won < 0.5 * expected:
        return head + (
            "messages are so small that their latency counts, which compression leaves as it is"
        )
    return head + (
        f"it saves {less} of waiting for {_work(arm, own)}, of a step of "
        f"{seconds_text(dense.step_s)}"
    )


def _work(arm: Prediction, own: float) -> str:
    """Return what an arm does beside the dense run's work: the column's coding, and the rest."""
    parts = [f"{seconds_text(arm.coding_s)} of coding"] if arm.coding_s else []
    parts += [f"{seconds_text(own)} of other passes"] if seconds_text(own) != "0 ms" else []
    return " and ".join(parts) or "no more work"


def seconds_text(seconds: float) -> str:
    """Return seconds for people, in tables and sentences alike; below 50 ns is 0."""
    if abs(seconds) < 5e-8:
        return "0 ms"
    if seconds < 1e-4:
        return f"{1e6 * seconds:.3g} us"
    if seconds < 0.09995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3f} s" if seconds < 1000 else f"{seconds:.4g} s"
