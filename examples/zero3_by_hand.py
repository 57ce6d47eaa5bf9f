"""Ascending-precision ZeRO-3 without FSDP2: what `tw.aquavit.attach` does, in forty readable lines.

Each rank owns one flat fp32 shard of every parameter. A step: encode the own shards at the level
of the step, gather and decode all shards, compute loss and gradients with the decoded weights,
reduce-scatter the gradients, and update the fp32 shards with them.

Run: torchrun --nproc-per-node 2 examples/zero3_by_hand.py
"""

import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import thinwire as tw
from thinwire.codecs import Blockwise

STEPS, VOCAB, DIM = 60, 64, 64


def shard_of(tensor, rank, world_size):
    """Return this rank's flat part [ceil(N/R)], padded with zeros."""
    size = -(-tensor.numel() // world_size)
    flat = F.pad(tensor.detach().flatten(), (0, size * world_size - tensor.numel()))
    return flat[rank * size : (rank + 1) * size].clone()


def gather(shard, shape, codec, ledger):
    """Return the full weight that every rank computes with: decode(encode(w)) of all shards."""
    parts = tw.comm.all_gather(shard, codec, ledger=ledger)
    return parts.view(-1)[: shape.numel()].view(shape).requires_grad_()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    shards = {n: shard_of(p, rank, world_size) for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(shards.values(), lr=3e-3)
    schedule, ledger = tw.aquavit.Schedule(STEPS), tw.Ledger()
    ledger.expect("weights", num_ranks=world_size)

    for step in range(STEPS):
        level = schedule.level(step)
        codec = Blockwise(bits=level.bits, block_size=level.block_size)
        weights = {
            n: gather(shards[n], shape, codec if len(shape) > 1 else None, ledger)
            for n, shape in shapes.items()
        }
        generator = torch.Generator().manual_seed(step * world_size + rank)
        tokens = torch.randint(0, VOCAB, (16, 32), generator=generator)
        logits = functional_call(model, weights, tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), ((tokens * 5 + 7) % VOCAB).flatten())
        for name, grad in zip(
            weights, torch.autograd.grad(loss, list(weights.values())), strict=True
        ):
            rows = torch.stack([shard_of(grad, r, world_size) for r in range(world_size)])
            mean = tw.comm.reduce_scatter(rows, None, ledger=ledger)[0] / world_size
            shards[name].grad = mean
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.4f} at {level.bpw:.2f} bits per weight")
    if rank == 0:
        print(ledger.check())

    # A rank that leaves while another still works, or a group that cycles hold, aborts the process.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
