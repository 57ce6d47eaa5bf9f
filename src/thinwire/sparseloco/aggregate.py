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

__all__ = ["mean", "scales", "weights"]

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


def mean(
    record: Record,
    index: int,
    messages: Sequence[Message],
    weight: Mapping[int, float],
    options: Options,
) -> Tensor:
    """Return the mean of one tensor, fp32 [N].

    Args:
        record: the tensor.
        index: its place in the table.
        messages: the accepted ones that don't abstain, by ascending replica id; at least one.
        weight: by replica id.
        options: the run's settings.
    """
    device = messages[0].payload.device
    total = torch.zeros(record.numel, device=device)
    by_element = record.sparse and options.aggregate == "senders"
    count = torch.zeros(record.numel if by_element else 1, device=device)
    factors = scales([m.norms[index] for m in messages], options)
    for message, factor in zip(messages, factors, strict=True):
        w = weight[message.header.replica]
        if w == 0.0 or record.numel == 0:
            continue
        position, value = record.decode(message.payload)
        if factor != 1.0:
            value = value * factor
        if position is None:
            total += value * w
        else:
            total[position] += value * w
        if by_element and position is not None:
            count[position] += w
        else:
            count += w
    return torch.where(count > 0, total / count, 0.0)
