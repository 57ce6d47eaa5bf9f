"""What one FSDP2 gather holds: one segment per parameter, quantized or sent raw with a reason.

FSDP2 hands the comm object a flat concatenation of all parameters of a module. Quantizing across a
border would mix norm gains near 1 with weights near 0.02, so every parameter is its own message.

Parameters may be stored quantized (`StoredShard`). Then FSDP2's flat buffer holds bytes: a stored
parameter's message and other parameters' values. The stored message travels as it is, unless the
codec in force is smaller: then the shard puts the codec's bytes at the front of its place, and
only those travel.

Legend: `N` elements of a segment on this rank, padding included; `W` wire bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire import _compat
from thinwire.codecs import Codec
from thinwire.errors import ConfigError

__all__ = [
    "Rules",
    "Segment",
    "Span",
    "StoredShard",
    "clean_name",
    "find_segments",
    "lay_out",
    "reason_raw",
    "recodes",
]

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


class StoredShard(Protocol):
    """A shard that lies quantized in memory and hands FSDP2 one message (thinwire.eco's)."""

    stored: Any
    """Shared by all pieces of the parameter: `message_nbytes(num_ranks)`, and `recode`, to be set
    to a function that gives the codec for the next message, None for the stored codes."""

    def versions(self) -> tuple[int, ...]:
        """Return what changes when codes do."""
        ...

    def values(self) -> torch.Tensor:
        """Return the fp32 values."""
        ...


@dataclass(frozen=True)
class Segment:
    """One parameter's part of a module's gather.

    Attributes:
        name: full parameter name.
        numel: padded elements of this rank's shard.
        reason: why it travels raw, or as stored; None if it is quantized for the wire.
        param: torch's FSDPParam.
        stored_nbytes: bytes of its message if it is stored quantized, else 0.
    """

    name: str
    numel: int
    reason: str | None
    param: Any
    stored_nbytes: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the gathered parameter."""
        return self.param.param_dtype or self.param.orig_dtype

    @property
    def shard(self) -> StoredShard:
        """Return the quantized shard of a stored segment."""
        return self.param.sharded_param.detach().to_local()

    def versions(self) -> tuple[int, ...]:
        """Return what changes when the shard's values do."""
        # An in-place operation on the DTensor counts there, one on its local tensor counts here.
        own = self.param.sharded_param._version
        if self.stored_nbytes:
            return (own, *self.shard.versions())
        return own, _compat.fsdp_param_data(self.param)._version


@dataclass(frozen=True)
class Span:
    """Where a segment lies in the flat tensor and in the message.

    Attributes:
        segment: which.
        start: first element (or byte, if the flat tensor holds bytes).
        length: elements (or bytes).
        wire_start: first byte in the message.
        wire_nbytes: bytes in the message.
        coded: whether the gather encodes and decodes it; a stored shard does that itself.
    """

    segment: Segment
    start: int
    length: int
    wire_start: int
    wire_nbytes: int
    coded: bool

    @property
    def elements(self) -> slice:
        """Return the segment's part of the flat tensor."""
        return slice(self.start, self.start + self.length)

    @property
    def exempt(self) -> bool:
        """Return whether it travels uncompressed."""
        return not self.coded and not self.segment.stored_nbytes

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
        numel = param.padded_sharded_param_size.numel()
        nbytes = _stored_nbytes(name, param, module)
        trains = param.sharded_param.requires_grad
        reason = reason_raw(rules, name, len(param._orig_size), trains, numel)
        segments.append(Segment(name, numel, reason, param, nbytes))
    return segments


def _stored_nbytes(name: str, param: Any, module: FSDPModule) -> int:
    """Return the message bytes of a quantized shard, 0 for a plain one."""
    local = param.sharded_param.detach().to_local()
    if not hasattr(local, "fsdp_pre_all_gather"):
        return 0
    group = _compat.shard_group(module)
    if not hasattr(getattr(local, "stored", None), "message_nbytes"):
        raise ConfigError(
            f"parameter {name!r} is a {type(local).__name__} that brings its own all-gather "
            "format: leave its module out, or drop the subclass"
        )
    return local.stored.message_nbytes(1 if group is None else group.size())


def recodes(segment: Segment, codec: Codec | None) -> bool:
    """Return whether a stored segment travels by `codec`: only where that takes fewer bytes."""
    if codec is None or segment.reason is not None:
        return False
    return codec.wire_nbytes(segment.numel, torch.float32) < segment.stored_nbytes


def lay_out(segments: Sequence[Segment], codec: Codec, dtype: torch.dtype) -> list[Span]:
    """Return where each segment lies when quantized segments travel with `codec`.

    Args:
        segments: in the order of the flat tensor.
        codec: how quantized segments travel.
        dtype: the flat tensor's dtype.
    """
    in_bytes = any(s.stored_nbytes for s in segments)
    spans, start, wire_start = [], 0, 0
    for segment in segments:
        own = segment.dtype if in_bytes else dtype
        raw = segment.stored_nbytes or segment.numel * own.itemsize
        length = raw if in_bytes else segment.numel
        if segment.stored_nbytes:
            coded, by_codec = False, recodes(segment, codec)
        else:
            coded = by_codec = segment.reason is None
        numel_dtype = torch.float32 if segment.stored_nbytes else own
        nbytes = codec.wire_nbytes(segment.numel, numel_dtype) if by_codec else raw
        spans.append(Span(segment, start, length, wire_start, nbytes, coded))
        start, wire_start = start + length, wire_start + nbytes
    return spans
