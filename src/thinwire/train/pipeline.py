"""One forward and backward over a pipeline of stages, what crosses between them booked.

Legend: `B` sequences of this rank, `M` of a micro-batch, `T` tokens, `D` width, `V` vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinwire import comm
from thinwire.comm import Ledger, transport
from thinwire.pipeline import Stage
from thinwire.train.boundaries import Boundaries
from thinwire.train.config import Config
from thinwire.train.mesh import Layout
from thinwire.train.model import Transformer
from thinwire.train.passes import token_loss

__all__ = ["BookedStage", "PipelinePass", "WrappedStage"]


class BookedStage(PipelineStage):
    """A torch pipeline stage that books what it sends on link "pipeline"."""

    ledger: Ledger

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's send operations, booked."""
        return self._book(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's send operations, booked."""
        return self._book(super().get_bwd_send_ops(bwd_chunk_id))

    def _book(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            nbytes = op.tensor.numel() * op.tensor.element_size()
            self.ledger.book("pipeline", dense_bytes=nbytes, wire_bytes=nbytes)
        return ops


class WrappedStage(PipelineStage):
    """A torch pipeline stage around boundaries, whose module inside FSDP2 may shard.

    torch reduces gradients once per step, not once per micro-batch, where it sees FSDP2's module
    itself.
    """

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's; for the module inside."""
        with self._unwrapped():
            return super().backward_maybe_with_nosync(*args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See torch's; for the module inside."""
        with self._unwrapped():
            super().perform_reduce_grad(grad_scale_factor)

    @contextmanager
    def _unwrapped(self) -> Iterator[None]:
        wrapped = self.submod
        assert isinstance(wrapped, Stage)
        self.submod = wrapped.module
        try:
            yield
        finally:
            self.submod = wrapped


class PipelinePass:
    """1F1B over the `pp` axis; every stage rank is given the same share of tokens."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        model: Transformer,
        ledger: Ledger,
        boundaries: Boundaries | None = None,
    ) -> None:
        self.model, self.layout, self.ledger = model, layout, ledger
        self.boundaries, self.eval_boundaries = boundaries, config.evaluation.boundaries
        self.sends_ids = config.systems.pipeline.ids == "send"
        self.vocab_size = config.model.vocab_size
        self.group = layout.group("pp")
        self.dtype = getattr(torch, config.compute.dtype)
        self.micro_batches = config.data.micro_batches
        self.dim = config.model.dim
        per_rank = config.data.batch_seqs // layout.data_ranks // self.micro_batches
        self.shape_MT = (per_rank, config.data.seq_len_tokens)
        self.schedule = Schedule1F1B(self._stage(), self.micro_batches, loss_fn=token_loss)

    def _stage(self) -> PipelineStage:
        where = (self.layout.index("pp"), self.layout.sizes["pp"], self.layout.device)
        if self.boundaries is not None:  # books what it sends itself
            wrapped = self.boundaries.stage
            shapes = wrapped.static_args(*self.shape_MT, self.vocab_size)
            return WrappedStage(wrapped, *where, group=self.group, **shapes)
        shapes = self._shapes(self.shape_MT, self.vocab_size)
        stage = BookedStage(self.model, *where, group=self.group, **shapes)
        stage.ledger = self.ledger
        return stage

    def _shapes(self, shape_MT: tuple[int, int], vocab_size: int) -> dict[str, Any]:
        """Return static shapes: inferring them would run the model on made-up tokens."""

        def floats(width: int) -> Tensor:
            return torch.empty(
                *shape_MT, width, dtype=self.dtype, device=self.layout.device, requires_grad=True
            )

        tokens = torch.empty(shape_MT, dtype=torch.int64, device=self.layout.device)
        return {
            "input_args": tokens if self.model.is_first else floats(self.dim),
            "output_args": floats(vocab_size if self.model.is_last else self.dim),
        }

    def train(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """See `Pass`."""
        inputs = (x_BT,) if self.model.is_first else ()
        own_ids = self.boundaries is not None and not self.sends_ids and not self.model.is_first
        extra: dict[str, Any] = {"tokens": x_BT} if own_ids else {}
        if not self.model.is_last:
            self.schedule.step(*inputs, **extra)
            return torch.zeros((), device=x_BT.device)
        losses: list[Tensor] = []
        self.schedule.step(*inputs, target=y_BT, losses=losses, return_outputs=False, **extra)
        return torch.stack([loss.detach() for loss in losses]).mean()

    @torch.no_grad()
    def held_out(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """See `Pass`; the stages run one after the other (1F1B has no forward-only form)."""
        if self.boundaries is None:
            return self._held_out_dense(x_BT, y_BT)
        if self.eval_boundaries == "boundaries":
            return self._held_out_through(self.boundaries, x_BT, y_BT)
        projects = self.eval_boundaries == "projected"
        with self.boundaries.projected() if projects else nullcontext():
            return self._held_out_dense(x_BT, y_BT)

    def _held_out_through(self, boundaries: Boundaries, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Evaluate with what boundaries do in training."""
        stage, index = boundaries.stage, self.layout.index("pp")
        num_seqs, num_tokens = x_BT.shape
        inputs = stage.static_args(num_seqs, num_tokens, self.vocab_size)["input_args"]
        if self.model.is_first:
            out = stage(x_BT)
        else:
            received = []
            for like in inputs:
                wire = transport.recv(like.nbytes, index - 1, self.group, self.layout.device)
                received.append(wire.view(like.dtype).view(like.shape))
            out = stage(*received, **({} if self.sends_ids else {"tokens": x_BT}))
        stage.static_args(*self.shape_MT, self.vocab_size)
        if self.model.is_last:
            return token_loss(out, y_BT, reduction="sum")
        for part in out if isinstance(out, tuple) else (out,):
            transport.send(part.reshape(-1).view(torch.uint8), index + 1, self.group)
        return torch.zeros((), device=x_BT.device)

    def _held_out_dense(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        stage = self.layout.index("pp")
        if self.model.is_first:
            x = x_BT
        else:
            shape = (*x_BT.shape, self.dim)
            x = comm.recv(
                shape, self.dtype, None, stage - 1, device=self.layout.device, group=self.group
            )
        x = self.model(x)
        if self.model.is_last:
            return token_loss(x, y_BT, reduction="sum")
        x = x.to(self.dtype)
        comm.send(x, None, stage + 1, group=self.group)
        self.ledger.book(
            "pipeline",
            dense_bytes=x.nbytes,
            wire_bytes=x.nbytes,
            exempt_bytes=0 if self.boundaries is None else x.nbytes,
            reason="" if self.boundaries is None else "evaluation without boundaries",
        )
        return torch.zeros((), device=x_BT.device)
