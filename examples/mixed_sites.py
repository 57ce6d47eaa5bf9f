"""One whole replica beside a two-stage pipeline that sends 1/8 of its channels, one outer round.

Run: torchrun --nproc-per-node 3 examples/mixed_sites.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import thinwire as tw
from thinwire.replicas import Layout, MixedReplicas, Replica, Site

STEPS, VOCAB, DIM, SEQS, T, MICRO = 120, 64, 128, 16, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down_proj = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down_proj(F.silu(self.up(self.norm(x))))


def part(stage, stages):
    """Keep a stage's share of the whole model, under the names it has there."""
    torch.manual_seed(0)  # the same whole model everywhere
    names = ("embed", "block0", "block1", "block2", "block3", "head")
    layers = (nn.Embedding(VOCAB, DIM), *(Block() for _ in range(4)), nn.Linear(DIM, VOCAB))
    size = len(names) // stages
    kept = slice(stage * size, (stage + 1) * size)
    model = nn.Sequential()
    for name, layer in zip(names[kept], layers[kept], strict=True):
        model.add_module(name, layer)
    return model


def main():
    dist.init_process_group("gloo")
    fast, slow = Replica(ranks=(0,)), Replica(ranks=(1, 2), rank_ratio=8)
    ledger = tw.Ledger()
    site = Site(Layout(replicas=(fast, slow)), ledger=ledger)
    count = site.replica.num_stages
    wrapped = site.wrap(part(site.stage, count), site.basis(dim=DIM))
    optimizer = torch.optim.AdamW(wrapped.module.parameters(), lr=3e-3)
    outer = MixedReplicas(wrapped, optimizer, site, sync_every=10, ledger=ledger)
    schedule = None
    if count > 1:
        shapes = wrapped.static_args(SEQS // MICRO, T, output_dim=VOCAB)
        stage = PipelineStage(wrapped, site.stage, count, site.device, group=site.inner, **shapes)
        schedule = ScheduleGPipe(stage, MICRO, loss_fn=lambda y, t: F.cross_entropy(y.mT, t))

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(2 * step + site.index)
        tokens = torch.randint(0, VOCAB, (SEQS, T), generator=generator)
        targets, losses = (tokens * 5 + 7) % VOCAB, []
        if schedule is not None:
            first = [tokens] if site.stage == 0 else []
            schedule.step(*first, target=targets, losses=losses)
        else:
            losses = [F.cross_entropy(wrapped(tokens).mT, targets)]
            losses[0].backward()
        outer.count(tokens.numel())  # this replica's weight in the mean
        outer.project_gradients()
        optimizer.step()  # every 10th ends a round
        optimizer.zero_grad()
        if losses and step % 40 == 39:
            print(f"replica {site.index} step {step + 1}: loss {torch.stack(losses).mean():.3f}")
    print(f"rank {dist.get_rank()}: {ledger.check()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
