"""The all-gather that FSDP2 calls for a module's weights.

Steps of one call: 1. encode this rank's shard, once per optimizer step. 2. gather the messages of
all ranks, unless the kept ones still stand. 3. decode every message, the own one too, into FSDP2's
output, so that all ranks compute with the same bits in forward and backward.

Legend: `R` ranks, `N` elements per rank, `W` message bytes.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from thinwire import _compat
from thinwire.aquavit.segments import Segment, Span, lay_out, recodes
from thinwire.codecs import Codec
from thinwire.comm import call, transport
from thinwire.comm.ledger import all_gather_sent
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.aquavit.handle import Handle

__all__ = ["WeightGather"]


class WeightGather(_compat.AllGather):
    """FSDP2 comm object of one module; holds its encoded shard and, if kept, the gathered wire."""

    def __init__(self, handle: "Handle", name: str, segments: list[Segment], module: FSDPModule):
        self.handle = handle
        self.name = name
        self.segments = segments
        self._module = weakref.ref(module)
        self._spans: dict[tuple[Codec, torch.dtype], list[Span]] = {}
        self._message: tuple[Any, Tensor] | None = None
        self._kept: tuple[Any, Any, Tensor] | None = None

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
        """Fill output_tensor [R*N] from every rank's input_tensor [N], a slice of the output."""
        codec = self.handle.codec_for(self.name)
        if codec is None or not self._compresses(codec) or self._in_subgroup():
            return self._gather_raw(output_tensor, input_tensor, group, async_op)
        spans = self.spans(codec, input_tensor.dtype)
        if spans[-1].elements.stop != input_tensor.numel():
            raise ConfigError(
                f"module {self.name!r} gathers {input_tensor.numel()} elements but its parameters "
                f"hold {spans[-1].elements.stop}: parameters were replaced after attach; attach "
                "again after the change"
            )
        wires, work = self._wires(codec, spans, input_tensor, group, async_op)

        def finish() -> None:
            self._decode(codec, spans, wires, output_tensor.view(group.size(), -1))

        if async_op and work is not None:
            return _DecodeOnWait(work, finish)
        finish()
        return None

    def _compresses(self, codec: Codec) -> bool:
        return any(
            recodes(s, codec) if s.stored_nbytes else s.reason is None for s in self.segments
        )

    def spans(self, codec: Codec, dtype: torch.dtype) -> list[Span]:
        """Return the message layout for a codec."""
        if (codec, dtype) not in self._spans:
            self._spans[codec, dtype] = lay_out(self.segments, codec, dtype)
        return self._spans[codec, dtype]

    @property
    def kept_bytes(self) -> int:
        """Return the memory that kept wire messages take right now, in bytes."""
        return self._kept[2].numel() if self._kept else 0

    def drop(self) -> None:
        """Forget encoded and kept messages: the weights changed."""
        self._message = self._kept = None

    def encoded(self, codec: Codec, spans: list[Span], input_tensor: Tensor, rank: int) -> Tensor:
        """Return this rank's message [W], encoded once per state of its weights."""
        key = (codec, input_tensor.dtype, self._versions())
        if self._message is None or self._message[0] != key:
            with call.timed(self.handle.ledger, "weights", "encode_s"):
                self._message = (key, self._encode(codec, spans, input_tensor, rank))
        return self._message[1]

    def _encode(self, codec: Codec, spans: list[Span], input_tensor: Tensor, rank: int) -> Tensor:
        nbytes = spans[-1].bytes.stop
        message = torch.empty(nbytes, dtype=torch.uint8, device=input_tensor.device)
        for span in spans:
            part, out = input_tensor[span.elements], message[span.bytes]
            if not span.coded:
                out.copy_(part.view(torch.uint8)[: span.wire_nbytes])
                continue
            master = _compat.fsdp_param_data(span.segment.param)
            # A codec that sends the dtype as it is (Cast) has room for the cast values alone.
            fits = codec.wire_nbytes(span.segment.numel, master.dtype) == span.wire_nbytes
            if self.handle.source == "master" and fits:
                # Offloaded shards lie on the CPU: encode after the copy to the device.
                part = master.to(part.device)
            elif part.dtype == torch.uint8:
                part = part.clone().view(span.segment.dtype)
            coder = self.handle.keyed(codec, span.segment.name, rank * span.segment.numel)
            coder.encode(part, out=out)
        return message

    def _wires(
        self,
        codec: Codec,
        spans: list[Span],
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> tuple[Tensor, dist.Work | None]:
        """Return the messages of all ranks [R, W] and the work to wait for, if they are under way.

        Whether kept messages serve must be one verdict of all ranks, so it uses the step count
        alone; local edits of the weights outside a step are an error.
        """
        key = (self.handle.epoch, codec, input_tensor.dtype)
        if self._kept is not None and self._kept[0] == key:
            _, versions, wires = self._kept
            if versions != self._versions():
                raise ConfigError(
                    f"weights of module {self.name!r} changed outside an optimizer step while "
                    f"keep_wire={self.handle.keep_wire!r} holds their gathered form: call "
                    "handle.refresh() on every rank after such an edit"
                )
            if self.handle.keep_wire == "forward":
                self._kept = None
            return wires, None
        message = self.encoded(codec, spans, input_tensor, group.rank())
        with call.timed(self.handle.ledger, "weights", "wait_s"):
            wires, work = transport.all_gather(message, group, async_op=async_op)
        self._book(spans, input_tensor, group.size())
        self._kept = (key, self._versions(), wires) if self._keeps() else None
        return wires, work

    def _keeps(self) -> bool:
        policy, module = self.handle.keep_wire, self._module()
        # Asked at each call: FSDP2 decides at its first forward that the root stays gathered.
        reshards = module is not None and not _compat.keeps_unsharded_after_forward(module)
        wanted = policy == "accumulate" or (policy == "forward" and reshards)
        return wanted and self.handle.trains

    def _decode(self, codec: Codec, spans: list[Span], wires: Tensor, out_RN: Tensor) -> None:
        handle, dtype = self.handle, out_RN.dtype
        with call.timed(handle.ledger, "weights", "decode_s"):
            for span in spans:
                part, out = wires[:, span.bytes], out_RN[:, span.elements]
                if not span.coded:
                    out.view(torch.uint8)[:, : span.wire_nbytes] = part
                    continue
                numel, own = span.segment.numel, span.segment.dtype
                if numel == 0:
                    continue
                call.raise_if_flagged(codec, part, numel, own, handle.nonfinite, "weights")
                if dtype == torch.uint8:
                    out.copy_(codec.decode(part, numel, own).view(torch.uint8))
                else:
                    codec.decode(part, numel, dtype, out=out)

    def _book(self, spans: list[Span], input_tensor: Tensor, num_ranks: int) -> None:
        if self.handle.ledger is None:
            return
        exempt = sum(span.wire_nbytes for span in spans if span.exempt)
        dense = self._dense_bytes(input_tensor)
        self.handle.ledger.book(
            "weights",
            dense_bytes=all_gather_sent(dense, num_ranks),
            wire_bytes=all_gather_sent(spans[-1].bytes.stop, num_ranks),
            exempt_bytes=all_gather_sent(exempt, num_ranks),
        )

    def _dense_bytes(self, input_tensor: Tensor) -> int:
        """Return what this rank's weights take in the dtype that the model computes with."""
        if not any(s.stored_nbytes for s in self.segments):
            return input_tensor.numel() * input_tensor.itemsize
        return sum(s.numel * s.dtype.itemsize for s in self.segments)

    def _gather_raw(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        if self.handle.ledger is not None:
            wire = input_tensor.numel() * input_tensor.itemsize
            stored = sum(s.stored_nbytes for s in self.segments)
            compresses = self.handle.schedule is not None or self.handle.stores
            self.handle.ledger.book(
                "weights",
                dense_bytes=all_gather_sent(self._dense_bytes(input_tensor), group.size()),
                wire_bytes=all_gather_sent(wire, group.size()),
                exempt_bytes=all_gather_sent(wire - stored, group.size()) if compresses else 0,
            )
        return _compat.all_gather_single(
            output_tensor, input_tensor, group=group, async_op=async_op
        )

    def _in_subgroup(self) -> bool:
        # The second gather of an integer reshard_after_forward starts from decoded weights under
        # other shard borders: quantizing again would break forward == backward.
        return any(_compat.is_resharded_to_subgroup(s.param) for s in self.segments)

    def _versions(self) -> tuple[int, ...]:
        return tuple(version for s in self.segments for version in s.versions())


class _DecodeOnWait(dist.Work):
    """Work whose `wait` waits for the wire and then decodes, once."""

    def __init__(self, work: dist.Work, finish: Any):
        super().__init__()
        self._work = work
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the messages and decode them."""
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True
