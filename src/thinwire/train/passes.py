"""One forward and backward over this rank's share of a batch.

`WholePass` here and `pipeline.PipelinePass` give the same two calls, so that the loop doesn't know
whether it drives a pipeline.

Legend: `B` sequences of this rank, `M` of a micro-batch, `T` tokens, ``V` vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from thinwire.comm import Ledger
from thinwire.train.boundaries import Boundaries
from thinwire.train.config import Config
from thinwire.train.data import IGNORED
from thinwire.train.mesh import Layout
from thinwire.train.model import Transformer
from thinwire.train.replicas import Sync

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


def make_pass(
    config: Config,
    layout: Layout,
    model: nn.Module,
    sync: Sync,
    ledger: Ledger,
    boundaries: Boundaries | None = None,
) -> Pass:
    """Return the pass that fits the layout."""
    if layout.sizes["pp"] > 1:
        # torch's pipelining imports its compiler: more than a second for each rank.
        from thinwire.train.pipeline import PipelinePass  # noqa: PLC0415

        assert isinstance(model, Transformer)  # pipelines are not wrapped
        return PipelinePass(config, layout, model, ledger, boundaries)
    return WholePass(config, model, sync)


class WholePass:
    """Micro-batches one after the other; gradients are reduced in the last one only."""

    def __init__(self, config: Config, model: nn.Module, sync: Sync) -> None:
        self.model, self.sync = model, sync
        self.micro_batches = config.data.micro_batches

    def train(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """See `Pass`."""
        total = torch.zeros((), device=x_BT.device)
        parts = zip(x_BT.chunk(self.micro_batches), y_BT.chunk(self.micro_batches), strict=True)
        for i, (x_MT, y_MT) in enumerate(parts):
            self.sync.armed = i == self.micro_batches - 1
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(self.sync.armed)
            loss = token_loss(self.model(x_MT), y_MT) / self.micro_batches
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def held_out(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """See `Pass`."""
        return token_loss(self.model(x_BT), y_BT, reduction="sum")
