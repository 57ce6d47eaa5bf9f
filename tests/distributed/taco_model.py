"""A small decoder and its plans, for the tensor-parallel tests."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

VOCAB, WIDTH, HEAD = 61, 64, 16


class Attention(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x):
        heads = [w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width, hidden, bias):
        super().__init__()
        self.up, self.gate = (nn.Linear(width, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, hidden, bias):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, bias)
        self.mlp = FeedForward(width, hidden, bias)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    def __init__(self, *, width=WIDTH, hidden=2 * WIDTH, layers=2, bias=True, dtype=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width, hidden, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def make_net(**kw):
    """Return a net whose weights don't depend on the global generator, which ranks share."""
    net = Net(**kw)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in net.named_parameters():
            noise = torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5
            is_norm_weight = p.ndim == 1 and name.endswith("weight")
            p.copy_(1 + 0.1 * noise if is_norm_weight else noise)
    return net


def make_tokens(batch=2, length=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (batch, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradients(net, batch, forward=None):
    """Return the loss, logits and all gradients, whole."""
    logits = (forward or net)(batch[0])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    net.zero_grad()
    loss.backward()
    out = {"loss": loss.detach(), "logits": logits.detach()}
    return out | {name: full(p.grad) for name, p in net.named_parameters()}


def relative_errors(got, want):
    """Per tensor; key biases are left out, whose gradient is zero but for rounding."""
    names = [n for n in want if not n.endswith("k.bias") and n != "loss"]
    return {n: ((got[n] - want[n]).norm() / want[n].norm()).item() for n in names}


def shared(layout):
    return PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),))


def tp_plan(*, share=True):
    """Tensor parallel: blocks only."""
    plan = {}
    for inner, columns, row in (("attn", "qkv", "o"), ("mlp", ("up", "gate"), "down")):
        if share:
            plan[f"layers.*.{inner}"] = shared(Replicate())
        plan |= {f"layers.*.{inner}.{c}": ColwiseParallel() for c in columns}
        plan[f"layers.*.{inner}.{row}"] = RowwiseParallel()
    return plan


def sp_plan(*, head=True, share=True):
    """Tensor and sequence parallel, embedding and head split too."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "layers.*.n1": SequenceParallel(),
        "layers.*.n2": SequenceParallel(),
    }
    if head:
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for inner, columns, row in (("attn", "qkv", "o"), ("mlp", ("up", "gate"), "down")):
        if share:
            plan[f"layers.*.{inner}"] = shared(Shard(1))
        inputs = None if share else Shard(1)
        plan |= {f"layers.*.{inner}.{c}": ColwiseParallel(input_layouts=inputs) for c in columns}
        plan[f"layers.*.{inner}.{row}"] = RowwiseParallel(output_layouts=Shard(1))
    return plan
