"""Two sites train apart and agree every 10 steps, in 2 bits: the marked lines are thinwire's.

Run: torchrun --nproc-per-node 2 examples/two_sites.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import thinwire as tw

STEPS, VOCAB, DIM = 200, 64, 128


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(site, step):
    """Return tokens of a site's own: each site sees other text."""
    generator = torch.Generator().manual_seed(2 * step + site)
    tokens = torch.randint(0, VOCAB, (16, 32), generator=generator)
    return tokens, (tokens * 5 + 7) % VOCAB


def main():
    dist.init_process_group("gloo")
    site = dist.get_rank()
    torch.manual_seed(0)  # all sites start from the same weights
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ledger = tw.Ledger()
    # Follows optimizer.step(): every 10th ends a round. No DDP, no gradient all-reduce.
    outer = tw.sparseloco.SparseLoCo(model, optimizer, sync_every=10, ledger=ledger)

    for step in range(STEPS):
        tokens, targets = batch(site, step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        outer.count(tokens.numel())  # a site's weight in the mean
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if site == 0 and step % 50 == 49:
            print(f"step {step + 1}  loss {loss.item():.3f}  in the mean: {outer.last.accepted}")
    if site == 0:
        print(ledger.check())
        gradients = STEPS * 4 * sum(p.numel() for p in model.parameters())
        sent = ledger["outer"].wire_bytes
        print(f"{gradients / sent:.0f}x below dense gradients of every step")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
