"""One forward and backward over this rank's share of a batch, whole or as a pipeline stage.

Both classes give the same two calls, so that the loop doesn't know whether it drives a pipeline.

Legend: `B` sequences of this rank, `M` of a micro-batch, `T` tokens, `D` width, `V` vocabulary.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from thinwire import comm
from thinwire.comm import Ledger
from thinwire.train.config import Config
from thinwire.train.data import IGNORED
from thinwire.train.mesh import Layout
from thinwire.train.model import Transformer

__all__ = ["Pass", "make_pass", "token_loss"]


class Pass(Protocol):
    """Run the model forward and backward, or forward alone."""

    def train(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Accumulate gradients of the mean loss; return that loss (0 off the last stage)."""
        ...

    def held_out(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Return the summed loss of all counted tokens (0 off the last stage), no gradients."""
        ...


def token_loss(logits_BTV: Tensor, y_BT: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats, computed in float32."""
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1),
        y_BT.flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )


def make_pass(config: Config, layout: Layout, model: Transformer, ledger: Ledger) -> Pass:
    """Return the pass that fits the layout."""
    if layout.sizes["pp"] > 1:
        return PipelinePass(config, layout, model, ledger)
    return WholePass(config, model)


class WholePass:
    """Micro-batches one after the other; FSDP2 reduces gradients in the last one only."""

    def __init__(self, config: Config, model: Transformer) -> None:
        self.model = model
        self.micro_batches = config.data.micro_batches

    def train(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """See `Pass`."""
        total = torch.zeros((), device=x_BT.device)
        parts = zip(x_BT.chunk(self.micro_batches), y_BT.chunk(self.micro_batches), strict=True)
        for i, (x_MT, y_MT) in enumerate(parts):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(i == self.micro_batches - 1)
            loss = token_loss(self.model(x_MT), y_MT) / self.micro_batches
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def held_out(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """See `Pass`."""
        return token_loss(self.model(x_BT), y_BT, reduction="sum")


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


class PipelinePass:
    """1F1B over the `pp` axis; every stage rank is given the same share of tokens."""

    def __init__(self, config: Config, layout: Layout, model: Transformer, ledger: Ledger) -> None:
        self.model, self.layout, self.ledger = model, layout, ledger
        self.group = layout.group("pp")
        self.dtype = getattr(torch, config.compute.dtype)
        self.micro_batches = config.data.micro_batches
        self.dim = config.model.dim
        per_rank = config.data.batch_seqs // layout.data_ranks // self.micro_batches
        shape_MT = (per_rank, config.data.seq_len_tokens)
        stage = BookedStage(
            model,
            layout.index("pp"),
            layout.sizes["pp"],
            layout.device,
            group=self.group,
            **self._shapes(shape_MT, config.model.vocab_size),
        )
        stage.ledger = ledger
        self.schedule = Schedule1F1B(stage, self.micro_batches, loss_fn=token_loss)

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
        if not self.model.is_last:
            self.schedule.step(*inputs)
            return torch.zeros((), device=x_BT.device)
        losses: list[Tensor] = []
        self.schedule.step(*inputs, target=y_BT, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean()

    @torch.no_grad()
    def held_out(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """See `Pass`; the stages run one after the other (1F1B has no forward-only form)."""
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
        comm.send(x.to(self.dtype), None, stage + 1, group=self.group, ledger=self.ledger)
        return torch.zeros((), device=x_BT.device)
