"""Gather the quantized change of the weights since the last gather: the rival arm, not the method.

Steps of one call: 1. in a new epoch, encode the shard's difference to what all ranks decoded last
and gather it; the first time, gather the shard itself, unquantized. 2. add the decoded differences
to the full fp32 copy that every rank keeps. 3. cast that copy into FSDP2's output. Later calls of
the epoch send nothing. What one step's encoding lost is part of the next step's difference.

The full copy gives up ZeRO-3's memory saving; a resumed run starts with an exact gather again, so
it is not bit-equal to an uninterrupted one.

Legend: `R` ranks, `N` elements per rank, `W` message bytes.

Reference: weight-difference quantization of SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.aquavit.segments import Segment, Span, lay_out
from thinwire.codecs import Codec
from thinwire.comm import call, transport
from thinwire.comm.ledger import all_gather_sent

if TYPE_CHECKING:
    from thinwire.aquavit.handle import Handle

__all__ = ["DifferenceGather"]


class DifferenceGather(_compat.AllGather):
    """FSDP2 comm object of one module that holds the weights all ranks decoded last."""

    def __init__(self, handle: "Handle", name: str, segments: list[Segment], codec: Codec):
        self.handle = handle
        self.name = name
        self.segments = segments
        self.codec = codec
        self._weights_RN: Tensor | None = None
        self._epoch = -1

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return FSDP2's gather buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill output_tensor [R*N] with the weights that all ranks agree on."""
        if any(_compat.is_resharded_to_subgroup(s.param) for s in self.segments):
            return _compat.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        if self._weights_RN is None:
            self._weights_RN = self._gather_exact(input_tensor, group)
        elif self._epoch != self.handle.epoch:
            self._add_differences(self._weights_RN, group, input_tensor.itemsize)
        self._epoch = self.handle.epoch
        output_tensor.view_as(self._weights_RN).copy_(self._weights_RN)
        return None

    @property
    def kept_bytes(self) -> int:
        """Return the memory of the full copy, in bytes."""
        copy = self._weights_RN
        return 0 if copy is None else copy.numel() * copy.itemsize

    def drop(self) -> None:
        """Do nothing: the next epoch's difference holds whatever changed."""

    def _masters(self) -> Tensor:
        return torch.cat([_compat.fsdp_param_data(s.param).float() for s in self.segments])

    def _gather_exact(self, input_tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        shard = self._masters().to(input_tensor.device)
        full = shard.new_empty(group.size(), shard.numel())
        _compat.all_gather_single(full.view(-1), shard, group=group)
        sent = all_gather_sent(shard.numel() * shard.itemsize, group.size())
        self._book(sent, sent, sent)
        return full

    def _add_differences(
        self, weights_RN: Tensor, group: dist.ProcessGroup, dense_itemsize: int
    ) -> None:
        spans = lay_out(self.segments, self.codec, torch.float32)
        delta = self._masters().to(weights_RN.device) - weights_RN[group.rank()]
        message = torch.empty(spans[-1].bytes.stop, dtype=torch.uint8, device=delta.device)
        with call.timed(self.handle.ledger, "weights", "encode_s"):
            for span in spans:
                self._encode(span, delta[span.elements], message[span.bytes])
        with call.timed(self.handle.ledger, "weights", "wait_s"):
            wires, _ = transport.all_gather(message, group)
        with call.timed(self.handle.ledger, "weights", "decode_s"):
            for span in spans:
                weights_RN[:, span.elements] += self._decode(span, wires[:, span.bytes])
        dense = delta.numel() * dense_itemsize
        exempt = sum(span.wire_nbytes for span in spans if span.segment.reason)
        self._book(*(all_gather_sent(n, group.size()) for n in (dense, message.numel(), exempt)))

    def _encode(self, span: Span, delta: Tensor, out: Tensor) -> None:
        if span.segment.reason:
            out.copy_(delta.view(torch.uint8))
        else:
            self.codec.encode(delta, out=out)

    def _decode(self, span: Span, wires: Tensor) -> Tensor:
        if span.segment.reason:
            return wires.contiguous().view(torch.float32)
        numel, nonfinite = span.segment.numel, self.handle.nonfinite
        call.raise_if_flagged(self.codec, wires, numel, torch.float32, nonfinite, "weights")
        return self.codec.decode(wires, numel, torch.float32)

    def _book(self, dense_bytes: int, wire_bytes: int, exempt_bytes: int) -> None:
        if self.handle.ledger is not None:
            self.handle.ledger.book(
                "weights", dense_bytes=dense_bytes, wire_bytes=wire_bytes, exempt_bytes=exempt_bytes
            )
