"""A two-stage pipeline that sends 1/8 of its channels: the marked lines are thinwire's.

Run: torchrun --nproc-per-node 2 examples/pp_subspace.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import thinwire as tw

STEPS, VOCAB, DIM, SEQS, T, MICRO = 60, 64, 128, 16, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down_proj = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down_proj(F.silu(self.up(self.norm(x))))


class Part(nn.Module):
    """The first or the last half of the model; names are those of the whole."""

    def __init__(self, first):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if first else None
        self.blocks = nn.Sequential(Block(), Block())
        self.head = None if first else nn.Linear(DIM, VOCAB)

    def forward(self, x):
        x = self.blocks(x if self.embed is None else self.embed(x))
        return x if self.head is None else self.head(x)


def batch(step):
    """Tokens and the ones to predict: a fixed permutation to learn."""
    tokens = torch.randint(0, VOCAB, (SEQS, T), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens * 5 + 7) % VOCAB


def main():
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    torch.manual_seed(rank)
    part = Part(first=rank == 0)

    ledger = tw.Ledger()  # 1: counts every byte
    basis = tw.pipeline.Basis(dim=DIM, rank=DIM // 8)
    wrapped = tw.pipeline.wrap(part, index=rank, num_stages=2, basis=basis, ledger=ledger)  # 2
    shapes = wrapped.static_args(SEQS // MICRO, T, output_dim=VOCAB)  # 3: what the wire carries

    stage = PipelineStage(wrapped, rank, 2, device, **shapes)
    schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda y, t: F.cross_entropy(y.mT, t))
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    if wrapped.constraint is not None:  # 4: the last stage has none
        wrapped.constraint.attach(optimizer)
    for step in range(STEPS):
        tokens, targets = batch(step)
        losses = []
        schedule.step(*([tokens] if rank == 0 else []), target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step % 20 == 19:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}")
    print(f"rank {rank}: {ledger.check()}")  # 5: raises unless the boundary was compressed
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
