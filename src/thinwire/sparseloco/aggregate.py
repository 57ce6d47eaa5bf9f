"""The mean of the accepted messages, in fp32 and in ascending order of replica ids.

    senders    D[i] = sum of w_r v_r[i] / sum of w_r, both over the replicas that sent element i
    replicas   D[i] = sum of w_r v_r[i] / sum of w_r over all accepted replicas
    dense      tensors sent whole: the second, in both cases

A sender is one whose message lists the element, whatever its value. With the median clip a tensor
of a replica whose norm exceeds the median of the accepted norms counts scaled down to it.

Legend: `N` elements.
"""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.sparseloco.message import Message
from thinwire.sparseloco.options import Options
from thinwire.sparseloco.table import Record

__all__ = ["Mean", "scales", "weights"]

MAX_WEIGHT = 2.0  # of the median


def weights(tokens: Mapping[int, int], options: Options) -> dict[int, float]:
    """Return each replica's weight: 1 for the median number of tokens, at most 2.

    Args:
        tokens: processed in the round, by replica id.
        options: the run's settings.
    """
    if options.weights == "equal" or not any(tokens.values()):
        return dict.fromkeys(tokens, 1.0)
    middle = statistics.median(tokens.values()) or max(tokens.values())
    return {r: float(np.float32(min(MAX_WEIGHT, n / middle))) for r, n in tokens.items()}


def scales(norms: Sequence[float], options: Options) -> list[float]:
    """Return the factor of each accepted replica's tensor under the median clip."""
    if options.median_clip == "off" or len(norms) < 3:
        return [1.0] * len(norms)
    middle = statistics.median(norms)
    return [1.0 if norm <= middle else middle / norm for norm in norms]


class Mean:
    """The outer step of one tensor after the other, touching only elements that someone sent.

    Args:
        messages: the accepted ones, by ascending replica id; at least one.
        options: the run's settings.
    """

    def __init__(self, messages: Sequence[Message], options: Options) -> None:
        self.messages, self.options = messages, options
        self.weight = weights({m.header.replica: m.header.tokens for m in messages}, options)
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def step(self, record: Record, index: int, theta: Tensor, alpha: float) -> Tensor | None:
        """Return theta - alpha*D of one tensor; None where that is not finite.

        Args:
            record: the tensor.
            index: its place in the table.
            theta: fp32 in the tensor's shape; kept.
            alpha: outer learning rate.
        """
        old, new = theta.view(-1), theta.clone()
        parts = self._decoded(record, index)
        moved = self._sparse if record.sparse else self._dense
        finite = moved(parts, old, new.view(-1), alpha)
        return new if finite else None

    def _decoded(self, record: Record, index: int) -> list[tuple[float, Tensor | None, Tensor]]:
        """Return weight, positions and clipped values of each message that counts."""
        factors = scales([m.norms[index] for m in self.messages], self.options)
        parts = []
        for message, factor in zip(self.messages, factors, strict=True):
            w = self.weight[message.header.replica]
            if w != 0.0 and record.numel:
                position, value = record.decode(message.payload)
                parts.append((w, position, value if factor == 1.0 else value * factor))
        return parts

    def _dense(
        self,
        parts: Sequence[tuple[float, Tensor | None, Tensor]],
        old: Tensor,
        new: Tensor,
        alpha: float,
    ) -> bool:
        if not parts:
            return True
        total, count = torch.zeros_like(old), torch.zeros(1, device=old.device)
        for w, _, value in parts:
            total += value * w
            count += w
        torch.sub(old, alpha * (total / count), out=new)
        return bool(torch.isfinite(new).all())

    def _sparse(
        self,
        parts: Sequence[tuple[float, Tensor | None, Tensor]],
        old: Tensor,
        new: Tensor,
        alpha: float,
    ) -> bool:
        total, count = self._zeros(old)
        every = torch.zeros(1, device=old.device)
        for w, position, value in parts:
            total[position] += value * w
            count[position] += w
            every += w
        finite = True
        for _, position, _ in parts:
            share = count[position] if self.options.aggregate == "senders" else every
            moved = old[position] - alpha * (total[position] / share)
            finite = finite and bool(torch.isfinite(moved).all())
            new[position] = moved  # equal bits wherever several replicas sent an element
        for _, position, _ in parts:
            total[position] = 0.0
            count[position] = 0.0
        return finite

    def _zeros(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return two buffers of zeros as long as `like`, shared by all tensors."""
        total, count = self._scratch.get(like.device, (like[:0], like[:0]))
        if total.numel() < like.numel():
            total, count = torch.zeros_like(like), torch.zeros_like(like)
            self._scratch[like.device] = total, count
        return total[: like.numel()], count[: like.numel()]
