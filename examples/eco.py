"""Train FP8 weights without a master copy on one device: the marked lines are thinwire's.

Run: python examples/eco.py
"""

import torch
import torch.nn.functional as F
from torch import nn

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Net()
    dense_bytes = 12 * sum(p.numel() for p in model.parameters())
    tw.eco.quantize_(model, fmt="fp8_e4m3")  # blocks' weights become codes and scales
    # Steps each weight inside backward and frees its gradient.
    optimizer = tw.eco.EcoAdamW(model.parameters(), lr=3e-3, fused_backward=True)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (16, 32), generator=generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), ((tokens * 5 + 7) % VOCAB).flatten())
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")
    held = tw.eco.weight_nbytes(model) + tw.eco.optimizer_nbytes(optimizer)
    print(
        f"loss {loss.item():.3f}; weights and moments take {held / 2**20:.2f} MiB, "
        f"{1 - held / dense_bytes:.0%} below dense"
    )


if __name__ == "__main__":
    main()
