"""Models, gradients and drivers that several SCAPE tests share."""

import torch
from torch import nn

from thinwire.scape import Options, Simulator
from thinwire.scape.rules import Adams

SIZES = (1003, 517, 2048, 33, 800)


def parameters(sizes=SIZES, dtype=torch.float32, seed=0):
    """Return named matrices of one column with the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"w{i}", nn.Parameter(torch.randn(n, 1, generator=generator, dtype=dtype)))
        for i, n in enumerate(sizes)
    ]


def gradient(step, rank, index, like, noise=0.3):
    """Return the noisy gradient of a quadratic around 0, its own noise per (step, rank, tensor)."""
    generator = torch.Generator().manual_seed((step * 64 + rank) * 64 + index)
    scale = torch.linspace(0.1, 2.0, like.numel(), dtype=like.dtype).view(like.shape)
    noisy = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return like.detach() * scale + noise * noisy


def simulate(
    steps,
    num_workers,
    *,
    sizes=SIZES,
    dtype=torch.float32,
    unmasked="transfer",
    lr=0.01,
    watch=None,
    noise=0.3,
    rule=None,
    weight_decay=0.1,
    **options,
):
    """Run the noisy quadratic; return (named parameters, simulator)."""
    named = parameters(sizes, dtype)
    sim = Simulator(
        named,
        num_workers,
        lr=lr,
        rule=rule or Adams(unmasked),
        options=Options(**({"dense_below": 0, "density": 0.05} | options)),
        weight_decay=weight_decay,
    )
    for step in range(steps):
        grads = [
            [gradient(step, rank, i, p, noise) for i, (_, p) in enumerate(named)]
            for rank in range(num_workers)
        ]
        for rank in range(num_workers):
            for (_, p), g in zip(named, grads[rank], strict=True):
                p.grad = g.clone()
            sim.collect(rank)
        if watch is not None:
            watch(sim, grads)
        sim.step()
    return named, sim


def flat(sim, name, worker=0):
    """Return one worker's flat state over all runs."""
    return torch.cat([run.state[name].clone() for run in sim.workers[worker].runs])


def residuals(sim):
    """Return the mean residual over workers."""
    return torch.stack([flat(sim, "residual", w) for w in range(len(sim.workers))]).mean(0)


def train_rank(rank, steps, optimizer, named, *, noise=0.3, accumulate=1, start=0):
    """Step an optimizer on this rank's gradients of the noisy quadratic."""
    for step in range(start, start + steps):
        for i, (_, p) in enumerate(named):
            g = gradient(step, rank, i, p, noise)
            for _ in range(accumulate):
                part = g / accumulate
                p.grad = part if p.grad is None else p.grad + part
        optimizer.step()
        optimizer.zero_grad()


def weights_of(named):
    """Return copies of the parameters."""
    return [p.detach().clone() for _, p in named]


def all_equal(a, b):
    """Return whether two lists of tensors are bit-equal."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
