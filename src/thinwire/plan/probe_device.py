"""Seconds of codecs and of a step's computation on every rank's device at once.

All ranks work at the same time, as in training: local ranks share cores and memory.

Legend: `N` values.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec
from thinwire.kernels import adams
from thinwire.plan.links import CodecSpeed, Compute
from thinwire.plan.probe_clock import Clock
from thinwire.plan.probe_links import spread_s
from thinwire.scape import AdamS
from thinwire.scape.layout import list_entries
from thinwire.scape.rules import Adams
from thinwire.scape.table import build_table
from thinwire.scape.worker import Masking, Worker

__all__ = ["Work", "measure_codec", "measure_select", "measure_sparse", "measure_step"]

SMALL, LARGE = 2**12, 2**18
MIN_ROUNDS, MAX_ROUNDS = 3, 15
Call = Callable[[], Any]

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
    step: Call
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

    def encode(x: Tensor) -> Call:
        return lambda: codec.encode(x)

    def decode(x: Tensor) -> Call:
        wire = codec.encode(x)

        def call() -> None:
            # Collectives look for marked blocks before they use a message.
            if codec.facts.flags_nonfinite:
                codec.nonfinite_count(wire, x.numel(), x.dtype)
            codec.decode(wire, x.numel(), x.dtype)

        return call

    granule = codec.facts.granule
    coded = _fit(f"encode of {codec!r}", encode, granule, clock, seconds / 2)
    decoded = _fit(f"decode of {codec!r}", decode, granule, clock, seconds / 2)
    return CodecSpeed(
        encode_latency_s=coded[0],
        encode_s_per_value=coded[1],
        decode_latency_s=decoded[0],
        decode_s_per_value=decoded[1],
    )


def measure_select(clock: Clock, seconds: float) -> CodecSpeed:
    """Return what picking a tenth of a state's values costs (encode), and adding them back."""

    def pick(x: Tensor) -> Call:
        k = x.numel() // 10
        return lambda: x[adams.largest(x.abs(), k)]

    def add(x: Tensor) -> Call:
        index = adams.largest(x.abs(), x.numel() // 10)
        values = x[index]
        return lambda: x.index_add_(0, index, values, alpha=0.0)

    picked = _fit("picking the largest values", pick, 1, clock, seconds / 2)
    added = _fit("adding values back", add, 1, clock, seconds / 2)
    return CodecSpeed(
        encode_latency_s=picked[0],
        encode_s_per_value=picked[1],
        decode_latency_s=added[0],
        decode_s_per_value=added[1],
    )


def measure_sparse(clock: Clock, seconds: float) -> CodecSpeed:
    """Return what SCAPE's step at 1 % costs beyond a dense AdamS step, without its messages.

    Encode holds what comes before the exchange of values, decode what follows; the latency is that
    of one tensor.
    """

    def stepped(x: Tensor) -> Worker:
        param = nn.Parameter(x.view(1, -1))
        param.grad = 1e-3 * param.detach()
        group = {"params": [param], "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
        entries = list_entries([group | {"weight_decay": 0.1}])
        table = build_table([e.name for e in entries], [param.shape], 1, dense_below=0)
        worker = Worker(entries, table, 0, Adams(), Masking())
        worker.all_dense()
        commit(worker)
        worker.take_masks(dict(worker.picked))
        return worker

    def commit(worker: Worker) -> None:
        sent = [worker.outgoing(run)[0] for run in worker.runs]
        worker.commit(sent, sent, sent, next_density=0.01)

    def before(x: Tensor) -> Call:
        worker = stepped(x)

        def call() -> None:
            message = worker.mask_message(2, 0.01)
            worker.take_masks(worker.read_masks([message], 2, 0.01))
            for run in worker.runs:
                worker.outgoing(run)

        return call

    def after(x: Tensor) -> Call:
        worker = stepped(x)
        sent = [worker.outgoing(run)[0] for run in worker.runs]
        return lambda: worker.commit(sent, sent, sent, next_density=0.01)

    def dense(x: Tensor) -> Call:
        param = nn.Parameter(x)
        param.grad = 1e-3 * x
        return AdamS([param], lr=1e-3).step

    leaving = _fit("a sparse step's sending", before, 1, clock, seconds / 3)
    coming = _fit("a sparse step's update", after, 1, clock, seconds / 3)
    saved = _fit("a dense step", dense, 1, clock, seconds / 3)
    return CodecSpeed(
        encode_latency_s=leaving[0],
        encode_s_per_value=leaving[1],
        decode_latency_s=max(0.0, coming[0] - saved[0]),
        decode_s_per_value=max(1e-15, coming[1] - saved[1]),
    )


def _fit(
    what: str, make: Callable[[Tensor], Call], granule: int, clock: Clock, seconds: float
) -> tuple[float, float]:
    """Return latency and seconds per value of the call that `make` gives for a tensor."""
    sizes = [-(-n // granule) * granule for n in (SMALL, LARGE)]
    small, large = (_median_s(what, make, n, clock, seconds / 2) for n in sizes)
    slope = (large - small) / (sizes[1] - sizes[0])
    if slope <= 0:
        slope = large / sizes[1]
    return max(0.0, small - slope * sizes[0]), slope


def _median_s(
    what: str, make: Callable[[Tensor], Call], numel: int, clock: Clock, seconds: float
) -> float:
    made: list[Call] = []

    def prepare() -> list[float]:
        generator = torch.Generator().manual_seed(0)
        made.append(make(torch.randn(numel, generator=generator).to(clock.device)))
        made[0]()  # compiles
        return [clock.time_s(made[0])]

    (once_s,) = clock.alone(what, prepare, 1)
    rounds = _rounds(once_s, seconds)
    clock.meet()
    samples = clock.alone(what, lambda: [clock.time_s(made[0]) for _ in range(rounds)], rounds)
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
    step_s = max(statistics.median(samples), 1e-9)
    # Each part's slowest rank may be another one: what is kept are the parts' shares of the step.
    total_s = sum(of_parts)
    of_parts = [part * step_s / total_s if total_s else 0.0 for part in of_parts]
    return Compute(
        recipe=work.name,
        step_s=step_s,
        iqr_s=spread_s(samples),
        rounds=len(samples),
        tokens=work.tokens,
        params=work.params,
        **dict(zip(PARTS, of_parts, strict=True)),
    )


def _rounds(once_s: float, seconds: float) -> int:
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / max(once_s, 1e-7))))
