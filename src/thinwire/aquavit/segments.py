"""What one FSDP2 gather holds: one segment per parameter, quantized or sent raw with a reason.

FSDP2 hands the comm object a flat concatenation of all parameters of a module. Quantizing across a
border would mix norm gains near 1 with weights near 0.02, so every parameter is its own message.

Legend: `N` elements of a segment on this rank, padding included; `W` wire bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire import _compat
from thinwire.codecs import Codec
from thinwire.errors import ConfigError

__all__ = ["Rules", "Segment", "Span", "clean_name", "find_segments", "lay_out", "reason_raw"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which parameters are quantized; every verdict uses rank-independent facts only.

    Attributes:
        exclude: shell patterns of full parameter names that are sent raw.
        min_shard_numel: padded local shards with fewer elements are sent raw.
        quantize_frozen: quantize parameters that take no gradient.
    """

    exclude: tuple[str, ...] = ()
    min_shard_numel: int = 4096
    quantize_frozen: bool = False


def reason_raw(
    rules: Rules, name: str, num_dims: int, requires_grad: bool, shard_numel: int
) -> str | None:
    """Return why a parameter is sent raw, or None if it is quantized."""
    if any(fnmatch(name, pattern) for pattern in rules.exclude):
        return "excluded by name"
    if num_dims <= 1:
        return "fewer than 2 dimensions"
    if not requires_grad and not rules.quantize_frozen:
        return "frozen"
    if shard_numel < rules.min_shard_numel:
        return f"shard under {rules.min_shard_numel} elements"
    return None


@dataclass(frozen=True)
class Segment:
    """One parameter's part of a module's gather.

    Attributes:
        name: full parameter name.
        numel: padded elements of this rank's shard.
        reason: why it travels raw, None if it is quantized.
        param: torch's FSDPParam.
    """

    name: str
    numel: int
    reason: str | None
    param: Any


@dataclass(frozen=True)
class Span:
    """Where a segment lies in the flat tensor and in the message."""

    segment: Segment
    start: int
    wire_start: int
    wire_nbytes: int

    @property
    def elements(self) -> slice:
        """Return the segment's elements in the flat tensor."""
        return slice(self.start, self.start + self.segment.numel)

    @property
    def bytes(self) -> slice:
        """Return the segment's bytes in the message."""
        return slice(self.wire_start, self.wire_start + self.wire_nbytes)


def clean_name(name: str) -> str:
    """Return a parameter name without the parts that wrappers put in."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def find_segments(model: nn.Module, module: FSDPModule, rules: Rules) -> list[Segment]:
    """Return the segments of one FSDP module in the order of its flat buffer.

    Raises:
        ConfigError: the module has several parameter groups, or parameters that already travel in
            a storage format of their own.
    """
    names = {id(p): clean_name(n) for n, p in model.named_parameters()}
    try:
        params = _compat.fsdp_params(module)
    except ValueError:
        raise ConfigError(
            f"module {type(module).__name__} holds several FSDP parameter groups (per-parameter "
            "meshes, as for MoE experts): torch lets no custom all-gather on it. Shard the parts "
            "that use another mesh by fully_shard calls of their own."
        ) from None
    segments = []
    for param in params:
        name = names.get(id(param.sharded_param), param._module_info.param_name)
        if hasattr(param.sharded_param.to_local(), "fsdp_pre_all_gather"):
            raise ConfigError(
                f"parameter {name!r} is a {type(param.sharded_param.to_local()).__name__} that "
                "brings its own all-gather format: leave its module out, or drop the subclass"
            )
        numel = param.padded_sharded_param_size.numel()
        trains = param.sharded_param.requires_grad
        reason = reason_raw(rules, name, len(param._orig_size), trains, numel)
        segments.append(Segment(name, numel, reason, param))
    return segments


def lay_out(segments: Sequence[Segment], codec: Codec, dtype: torch.dtype) -> list[Span]:
    """Return where each segment lies when quantized segments travel with `codec`."""
    spans, start, wire_start = [], 0, 0
    for segment in segments:
        raw = segment.numel * dtype.itemsize
        nbytes = raw if segment.reason else codec.wire_nbytes(segment.numel, dtype)
        spans.append(Span(segment, start, wire_start, nbytes))
        start, wire_start = start + segment.numel, wire_start + nbytes
    return spans
