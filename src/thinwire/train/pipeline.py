"""One forward and backward over a pipeline of stages, what crosses between them booked.

Legend: `B` sequences of this rank, `M` of a micro-batch, `T` tokens, `D` width, `V` vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinwire import comm
from thinwire.comm import Ledger
from thinwire.train.config import Config
from thinwire.train.mesh import Layout
from thinwire.train.model import Transformer
from thinwire.train.passes import token_loss

__all__ = ["BookedStage", "PipelinePass"]


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
