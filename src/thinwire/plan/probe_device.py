"""Seconds of codecs and of a step's computation on every rank's device at once.

All ranks work at the same time, as in training: local ranks share cores and memory.

Legend: `N` values.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.plan.links import CodecSpeed, Compute
from thinwire.plan.probe_clock import Clock
from thinwire.plan.probe_links import spread_s

__all__ = ["Work", "measure_codec", "measure_step"]

SMALL, LARGE = 2**12, 2**18
MIN_ROUNDS, MAX_ROUNDS = 3, 15
PARTS = ("forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class Work:
    """A step's computation to be timed.

    Attributes:
        name: of the recipe, or "module:function".
        step: does one step; it may return the seconds of its parts, of `PARTS`.
        tokens: tokens of the step on this rank; 0: not known.
        params: parameters of the model on this rank; 0: not known.
        divide_by: ranks that split the computation which `step` does whole.
    """

    name: str
    step: Callable[[], Any]
    tokens: int = 0
    params: int = 0
    divide_by: int = 1


def measure_codec(codec: Codec, clock: Clock, seconds: float) -> CodecSpeed:
    """Return a codec's speed: a line through a small and a large message; collective.

    Args:
        codec: what to time.
        clock: agrees over the ranks.
        seconds: how long it may take, at least three rounds of each.

    Raises:
        ProbeError: the codec raised on some rank.
    """
    granule = codec.facts.granule
    sizes = [-(-n // granule) * granule for n in (SMALL, LARGE)]
    lines = []
    for direction in ("encode", "decode"):
        times = [_median_s(codec, direction, n, clock, seconds / 4) for n in sizes]
        slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
        if slope <= 0:
            slope = times[1] / sizes[1]
        lines.append((max(0.0, times[0] - slope * sizes[0]), slope))
    (encode_latency_s, encode_s), (decode_latency_s, decode_s) = lines
    return CodecSpeed(
        encode_latency_s=encode_latency_s,
        encode_s_per_value=encode_s,
        decode_latency_s=decode_latency_s,
        decode_s_per_value=decode_s,
    )


def _median_s(codec: Codec, direction: str, numel: int, clock: Clock, seconds: float) -> float:
    what = f"{direction} of {codec!r}"
    calls: dict[str, Callable[[], Any]] = {}

    def prepare() -> list[float]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(numel, generator=generator).to(clock.device)
        wire = codec.encode(x)
        decode = lambda: codec.decode(wire, numel, x.dtype)  # noqa: E731  the pair reads best so
        calls["call"] = (lambda: codec.encode(x)) if direction == "encode" else decode
        calls["call"]()  # compiles
        return [clock.time_s(calls["call"])]

    (once_s,) = clock.alone(what, prepare, 1)
    rounds = _rounds(once_s, seconds)
    clock.meet()
    samples = clock.alone(
        what, lambda: [clock.time_s(calls["call"]) for _ in range(rounds)], rounds
    )
    return max(statistics.median(samples), 1e-9)


def measure_step(work: Work, clock: Clock, seconds: float) -> Compute:
    """Return the seconds of a step, of the slowest rank; collective.

    Args:
        work: what to time.
        clock: agrees over the ranks.
        seconds: how long it may take, at least three rounds after one that isn't counted.

    Raises:
        ProbeError: the step raised on some rank.
    """
    parts: list[list[float]] = []

    def once() -> list[float]:
        found: list[Any] = []
        seconds = clock.time_s(lambda: found.append(work.step()))
        named = found[0] if isinstance(found[0], Mapping) else {}
        parts.append([float(named.get(part, 0.0)) / work.divide_by for part in PARTS])
        return [seconds]

    what = f"step of {work.name}"
    clock.show(work.name)
    clock.alone(what, once, 1)
    clock.meet()
    (once_s,) = clock.alone(what, once, 1)
    samples = [once_s]
    for _ in range(_rounds(once_s, seconds) - 1):
        clock.meet()
        samples += clock.alone(what, once, 1)
    samples = [seconds / work.divide_by for seconds in samples]
    of_parts = clock.agree([statistics.median(column) for column in zip(*parts[1:], strict=True)])
    return Compute(
        recipe=work.name,
        step_s=max(statistics.median(samples), 1e-9),
        iqr_s=spread_s(samples),
        rounds=len(samples),
        tokens=work.tokens,
        params=work.params,
        **dict(zip(PARTS, of_parts, strict=True)),
    )


def _rounds(once_s: float, seconds: float) -> int:
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / max(once_s, 1e-7))))
