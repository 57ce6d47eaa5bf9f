"""What operations cost by links.json: messages by interpolation, codecs by measured speeds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from thinwire.errors import ConfigError
from thinwire.plan.links import Group, Links
from thinwire.plan.stored import StoredCodec
from thinwire.plan.workload import (
    SELECT,
    SPARSE,
    Coding,
    Compute,
    Message,
    Workload,
    as_gather,
)

__all__ = ["MeasuredCosts"]


@dataclass(frozen=True)
class MeasuredCosts:
    """`Costs` of a probed mesh.

    Attributes:
        links: what the probe found.
        mesh: ranks per axis that the plan is for.
        step_s: seconds of a step's arithmetic; None: the probe's, scaled by parameters and tokens
            where those differ.
        burst_s: seconds of its speed that an idle link saves up and lets pass at once: what a
            shaped or a cloud provider's link may do, and messages of a probe one after the other
            don't show; 0: nothing.
        unlimited: the same links without the limit that `burst_s` is about: how fast a burst
            passes; None: in no time beyond the latency.

    Raises:
        ConfigError: the links are of another mesh, or hold no time of a step.
    """

    links: Links
    mesh: Mapping[str, int]
    step_s: float | None = None
    burst_s: float = 0.0
    unlimited: Links | None = None

    def __post_init__(self) -> None:
        for axis, size in self.mesh.items():
            probed = self.links.mesh.get(axis, 1)
            if size != probed:
                raise ConfigError(
                    f"the links were probed with mesh.{axis} {probed}, the plan has {size}: probe "
                    "with the plan's mesh"
                )
        if self.step_s is None and self.links.compute is None:
            raise ConfigError(
                "the links hold no compute time of a step: probe again with a recipe's step"
            )
        if self.step_s is not None and not 0 < self.step_s < math.inf:
            raise ConfigError(f"step_s must be above 0 and finite, got {self.step_s}")

    def least_s(self, message: Message) -> float:
        """Return the seconds on the unlimited link, or the latency; see `Costs`."""
        if self.unlimited is not None:
            return replace(self, links=self.unlimited, unlimited=None).seconds(message)
        group = self.links.group(self.wire(message.axis))
        speed = group.collectives.get(message.collective)
        return speed.latency_s if speed is not None else 0.0

    def wire(self, axis: str) -> str:
        """Return the wire of an axis: each has its own; see `Costs`."""
        return axis if axis != "world" else self._widest()

    def _widest(self) -> str:
        if not self.links.groups:
            raise ConfigError("the links hold no group: nothing was probed")
        return max(self.links.groups, key=lambda axis: self.links.groups[axis].size)

    def seconds(self, message: Message) -> float:
        """Return the interpolated seconds of a message."""
        if message.collective == "broadcast":
            message = as_gather(message)
        group = self.links.group(self.wire(message.axis))
        if message.axis == "world":
            # A few numbers: what counts is the latency, on every axis in turn at worst.
            found = [g.seconds("all_reduce", message.nbytes) for g in self.links.groups.values()
                     if "all_reduce" in g.collectives]  # fmt: skip
            if not found:
                raise ConfigError("the links hold no all_reduce, which every step makes")
            return max(found)
        return group.seconds(_probed(group, message.collective), message.nbytes)

    def wake_s(self, message: Message) -> float:
        """Return the probed seconds to wake what moves the bytes; see `Costs`."""
        return self.links.group(self.wire(message.axis)).wake_s

    def beyond(self, workload: Workload) -> dict[tuple[str, str], tuple[int, int]]:
        """Return (wire, collective) -> (largest message, largest probed) where that is less."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for work in (op.work for phase in workload.phases for op in phase.ops):
            if isinstance(work, Message):
                wire = self.wire(work.axis)
                group = self.links.group(wire)
                speed = group.collectives.get(_probed(group, work.collective))
                if speed is not None and work.nbytes > speed.points[-1].nbytes:
                    sizes = work.nbytes, speed.points[-1].nbytes
                    key = wire, work.collective
                    found[key] = max(sizes, found.get(key, sizes))
        return found

    def coding_s(self, coding: Coding) -> float:
        """Return the seconds to encode or decode.

        Raises:
            ConfigError: the codec was not probed.
        """
        speed = self.links.codecs.get(repr(coding.codec))
        if speed is None:
            if coding.codec.facts.exact:
                return 0.0  # a copy that the dense path makes too
            what = f"{type(coding.codec).__name__} as it is set for link {coding.link}"
            if isinstance(coding.codec, StoredCodec):
                what = f"weights stored as {coding.codec.fmt} (systems.storage)"
            raise ConfigError(
                f"the links hold no speed of {what}: probe again with this recipe and its settings"
            )
        if coding.what == "encode":
            return coding.calls * speed.encode_latency_s + coding.numel * speed.encode_s_per_value
        return coding.calls * speed.decode_latency_s + coding.numel * speed.decode_s_per_value

    def compute_s(self, compute: Compute, workload: Workload) -> float:
        """Return the seconds of arithmetic: the step's, dealt by floating-point operations."""
        if compute.what in (SELECT, SPARSE):
            return self._own_s(compute)
        known = self.links.compute
        if self.step_s is not None or known is None or not (known.forward_s and known.backward_s):
            return self.whole_step_s(workload) * compute.flops / workload.flops
        scale = self._scale(workload)
        if compute.what == "optimizer":
            return scale * known.optimizer_s if compute.numel else 0.0
        backward = workload.flops - workload.forward_flops
        forwards = compute.what == "forward"
        seconds, whole = (
            (known.forward_s, workload.forward_flops) if forwards else (known.backward_s, backward)
        )
        return scale * seconds * compute.flops / whole

    def _own_s(self, compute: Compute) -> float:
        """Return the seconds of an arm's own passes over its state."""
        if not compute.numel:
            return 0.0
        speed = self.links.codecs.get(compute.what)
        if speed is None:
            raise ConfigError(f"the links hold no speed of {compute.what!r} passes: probe again")
        latency_s = speed.encode_latency_s + speed.decode_latency_s
        per_value_s = speed.encode_s_per_value + speed.decode_s_per_value
        return compute.calls * latency_s + compute.numel * per_value_s

    def whole_step_s(self, workload: Workload) -> float:
        """Return the seconds of a step's arithmetic."""
        if self.step_s is not None:
            return self.step_s
        compute = self.links.compute
        assert compute is not None
        return self._scale(workload) * compute.step_s

    def _scale(self, workload: Workload) -> float:
        """Return the step's arithmetic over the probed one's, by parameters and tokens."""
        compute = self.links.compute
        assert compute is not None
        if not (compute.params and compute.tokens):
            return 1.0
        return workload.rank_params * workload.rank_tokens / (compute.params * compute.tokens)


def _probed(group: Group, collective: str) -> str:
    """Return whose speed stands for a collective: all-to-all's for an unprobed reduce-scatter."""
    unprobed = collective == "reduce_scatter" and collective not in group.collectives
    return "all_to_all" if unprobed else collective
