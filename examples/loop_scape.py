"""Data parallel without DDP: each step sends 5 % of a momentum, not every gradient.

Run: torchrun --nproc-per-node 2 examples/loop_scape.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import thinwire as tw

STEPS, VOCAB, DIM = 200, 64, 128


def build():
    torch.manual_seed(0)  # workers start from equal weights; Scape checks it
    return nn.Sequential(
        nn.Embedding(VOCAB, DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, VOCAB)
    )


def batch(step, rank):
    """Tokens and the ones to predict: a fixed permutation to learn."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    tokens = torch.randint(0, VOCAB, (16, 32), generator=generator)
    return tokens, (tokens * 5 + 7) % VOCAB


def main():
    dist.init_process_group("gloo")
    rank, model, ledger = dist.get_rank(), build(), tw.Ledger()
    optimizer = tw.scape.Scape(
        model.named_parameters(),
        lr=3e-3,
        # dense for 20 steps, then down to 5 % over 20 more
        density=tw.schedules.Density(0.05, warmup_steps=20, ramp_steps=20),
        ledger=ledger,
    )
    for step in range(STEPS):
        tokens, targets = batch(step, rank)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # no gradient leaves this worker
        optimizer.step()  # the one message: selected entries of the momentum
        optimizer.zero_grad()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if rank == 0:
        print(ledger.check())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
