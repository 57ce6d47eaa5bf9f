"""A plain FSDP2 script with compressed weight gathers: the three marked lines are thinwire's.

Run: torchrun --nproc-per-node 2 examples/fsdp2_aquavit.py
"""

import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw

STEPS, VOCAB, DIM = 100, 64, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def batch(step, rank):
    """Tokens and the ones to predict: a fixed permutation to learn."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    tokens = torch.randint(0, VOCAB, (16, 32), generator=generator)
    return tokens, (tokens * 5 + 7) % VOCAB


def main():
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), Block(), Block(), nn.Linear(DIM, VOCAB))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    ledger = tw.Ledger()  # 1: counts every byte
    handle = tw.aquavit.attach(  # 2: compresses every weight gather from here on
        model, tw.aquavit.Schedule(STEPS), ledger=ledger, min_shard_numel=1024
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, targets = batch(step, rank)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}, {handle.metrics()['bits']:.2f} bits")
    if rank == 0:
        print(ledger.check())  # 3: raises unless the gathers were compressed

    # A group that FSDP2's cycles still hold at exit would abort the process.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
