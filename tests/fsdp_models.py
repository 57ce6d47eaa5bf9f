"""Small FSDP2 models and a training loop that the weight-gather tests share."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

VOCAB = 37
# In-process ranks share torch's default generator.
_SEEDING = threading.Lock()


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks and head with sizes that no rank count divides."""

    def __init__(self, dim: int = 33, hidden: int = 65, num_blocks: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(num_blocks))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(
    mesh: DeviceMesh, *, wrap: Callable[[nn.Module], Any] | None = None, **kwargs: Any
) -> Net:
    with _SEEDING:
        torch.manual_seed(0)
        model = Net()
    for block in model.blocks:
        if wrap is not None:
            wrap(block)
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model


def batch(seed: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(0, VOCAB, (4, 9), generator=generator)
    return tokens[:, :-1], (tokens[:, :-1] * 7 + 3) % VOCAB


def loss_of(model: nn.Module, seed: int, rank: int) -> Tensor:
    tokens, targets = batch(seed, rank)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def train(
    model: nn.Module,
    rank: int,
    steps: int,
    *,
    accumulate: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
    after_step: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """Return this rank's loss per micro-step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(first, first + steps):
        for micro in range(accumulate):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = loss_of(model, step * accumulate + micro, rank)
            (loss / accumulate).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(step)
    return losses
