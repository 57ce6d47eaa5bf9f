"""A tensor-parallel block whose activations travel in FP8: the marked lines are thinwire's.

Run: torchrun --nproc-per-node 2 examples/tp_taco.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import thinwire as tw

STEPS, VOCAB, DIM = 60, 64, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.gate = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def batch(step):
    """Tokens and the ones to predict, the same on all ranks: a fixed permutation to learn."""
    tokens = torch.randint(0, VOCAB, (16, 32), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens * 5 + 7) % VOCAB


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), Block(), Block(), nn.Linear(DIM, VOCAB))
    plan = {  # torch's own styles; "*" is one part of a module's name
        "*.up": ColwiseParallel(),
        "*.gate": ColwiseParallel(),
        "*.down": RowwiseParallel(),
    }

    ledger = tw.Ledger()  # 1: counts every byte
    report = tw.taco.parallelize(model, mesh, plan, ledger=ledger)  # 2: splits and compresses
    if dist.get_rank() == 0:
        print(report)

    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], lr=3e-3)
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(ledger.check())  # 3: raises unless the messages were compressed
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
