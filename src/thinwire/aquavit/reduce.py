"""The reduce-scatter that FSDP2 calls for a module's gradients, dense or compressed.

Steps of a compressed call: 1. cut every parameter's gradient into R shards, as FSDP2 laid them out,
and encode shard by shard; small and 1-D ones travel raw. 2. all-to-all. 3. decode and add in rank
order, fp32. With error feedback, what encoding lost is added to the next step's gradient.

Legend: `R` ranks, `N` elements per rank, `W` message bytes.

Reference: two-hop quantized gradients as in ZeRO++ (Wang et al., 2023, arXiv 2306.10209).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.aquavit.segments import Segment, Span, lay_out
from thinwire.codecs import Codec
from thinwire.comm import call, transport
from thinwire.comm.ledger import reduce_scatter_sent
from thinwire.errors import ConfigError
from thinwire.kernels.finite import all_finite

if TYPE_CHECKING:
    from thinwire.aquavit.handle import Handle

__all__ = ["GradientReduce"]


class GradientReduce(_compat.ReduceScatter):
    """FSDP2 comm object of one module's gradients."""

    def __init__(self, handle: "Handle", name: str, segments: list[Segment]):
        self.handle = handle
        self.name = name
        # Gradients of weights that are stored quantized are plain tensors.
        trained = [s for s in segments if s.param.sharded_param.requires_grad]
        self.segments = [replace(s, stored_nbytes=0) for s in trained]
        self.residual: Tensor | None = None

    def keep_residual(self, num_ranks: int, device: torch.device) -> None:
        """Allocate the fp32 error [R, N] that feedback adds to the next gradient."""
        numel = sum(s.numel for s in self.segments)
        self.residual = torch.zeros(num_ranks, numel, device=device)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return FSDP2's reduce buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce input_tensor [R*N] over the group; leave this rank's part in output_tensor [N]."""
        codec = self.handle.gradients
        if codec is None or all(s.reason for s in self.segments):
            self._book(output_tensor, output_tensor.numel() * output_tensor.itemsize, None, group)
            transport.dense_reduce_scatter(output_tensor, input_tensor, group, op)
            return None
        if op != dist.ReduceOp.SUM:
            raise ConfigError(f"compressed gradients are summed, FSDP2 asked for {op}")
        spans = self._spans(codec, output_tensor)
        grads_RN = input_tensor.view(group.size(), -1)
        with call.timed(self.handle.ledger, "gradients", "encode_s"):
            messages = self._encode(codec, spans, grads_RN)
        with call.timed(self.handle.ledger, "gradients", "wait_s"):
            wires = transport.all_to_all(messages, group)
        with call.timed(self.handle.ledger, "gradients", "decode_s"):
            self._decode(codec, spans, wires, output_tensor)
        self._book(output_tensor, messages.shape[1], spans, group)
        return None

    def _spans(self, codec: Codec, output: Tensor) -> list[Span]:
        if sum(s.numel for s in self.segments) != output.numel():
            raise ConfigError(
                f"module {self.name!r} reduces {output.numel()} elements, its trainable parameters "
                f"hold {sum(s.numel for s in self.segments)}: some got no gradient. Call "
                "model.set_reduce_scatter_unused_params(True), or leave gradients uncompressed"
            )
        return lay_out(self.segments, codec, output.dtype)

    def _encode(self, codec: Codec, spans: list[Span], grads_RN: Tensor) -> Tensor:
        """Return the messages [R, W]; flags all of them if any gradient is not finite."""
        residual = self.residual
        if residual is not None:
            grads_RN = grads_RN + residual
        num_ranks, nbytes = grads_RN.shape[0], spans[-1].bytes.stop
        messages = grads_RN.new_empty(num_ranks, nbytes, dtype=torch.uint8)
        bad = self.handle.nonfinite == "raise" and not all_finite(grads_RN)
        for span in spans:
            part_RN, out_RW = grads_RN[:, span.elements], messages[:, span.bytes]
            if bad:
                part_RN = torch.full_like(part_RN, float("nan"))
            if span.segment.reason:
                out_RW.copy_(part_RN.contiguous().view(torch.uint8))
                continue
            for part, out in zip(part_RN, out_RW, strict=True):
                codec.encode(part, out=out)
            if residual is not None and not bad:
                decoded = codec.decode(out_RW, span.segment.numel, part_RN.dtype)
                residual[:, span.elements] = part_RN - decoded
        return messages

    def _decode(self, codec: Codec, spans: list[Span], wires: Tensor, output: Tensor) -> None:
        for span in spans:
            part, out = wires[:, span.bytes], output[span.elements]
            if span.segment.reason:
                rows = part.contiguous().view(output.dtype)
                total = rows[0].float()
                for row in rows[1:]:
                    total = total + row.float()
                out.copy_(total)
                continue
            if span.segment.numel == 0:
                continue
            call.raise_if_flagged(
                codec, part, span.segment.numel, out.dtype, self.handle.nonfinite, "gradients"
            )
            out.copy_(codec.decode_sum(part, span.segment.numel, output.dtype))

    def _book(
        self, output: Tensor, message_nbytes: int, spans: list[Span] | None, group: Any
    ) -> None:
        if self.handle.ledger is None:
            return
        exempt = sum(span.wire_nbytes for span in spans or () if span.segment.reason)
        if spans is None and self.handle.gradients is not None:
            exempt = message_nbytes
        dense = output.numel() * output.itemsize
        self.handle.ledger.book(
            "gradients",
            dense_bytes=reduce_scatter_sent(dense, group.size()),
            wire_bytes=reduce_scatter_sent(message_nbytes, group.size()),
            exempt_bytes=reduce_scatter_sent(exempt, group.size()),
        )
