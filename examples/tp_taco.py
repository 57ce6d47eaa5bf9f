"""A stock tensor-parallel plan whose traffic travels in FP8: the two marked lines are thinwire's.

Run: torchrun --nproc-per-node 2 examples/tp_taco.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import thinwire as tw

STEPS, VOCAB, DIM = 100, 64, 128
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def batch(step):
    """Tokens and the ones to predict, the same on every rank: a fixed permutation to learn."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (16, 32), generator=generator)
    return tokens, (tokens * 5 + 7) % VOCAB


def main():
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), Block(), Block(), nn.Linear(DIM, VOCAB))

    ledger = tw.Ledger()  # counts every byte
    report = tw.taco.parallelize(model, mesh, PLAN, ledger=ledger)  # for torch's own call

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if rank == 0:
        print(report)
        print(ledger.check())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
