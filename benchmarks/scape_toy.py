"""A character model on Python source and the arms that SCAPE is compared with, N workers simulated.

Two layers of width 64, four heads, 96 symbols, sequences of 64, 115,008 parameters. Warm-up over a
tenth of the steps from 0.01x, cosine to 0.1x, decay 0.1, no clipping.

Legend: `B` sequences, `T` characters, `D` width, `V` symbols.
"""

import math
import os
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.comm import Ledger
from thinwire.scape import AdamS, Demo, Dgc, Options, PowerSgd, Simulator, SyncSimulator
from thinwire.scape.rules import Adams, TopkAdamw
from thinwire.scape.worker import Masking
from thinwire.schedules import Density

SYMBOLS = "\n" + "".join(chr(c) for c in range(32, 127))
SEQ = 64
BATCH = 8


class Toy(nn.Module):
    """Pre-norm decoder with learned positions."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(len(SYMBOLS), width)
        self.place = nn.Embedding(SEQ, width)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            block = nn.ModuleDict(
                {
                    "norm1": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "norm2": nn.RMSNorm(width),
                    "up": nn.Linear(width, 4 * width, bias=False),
                    "down": nn.Linear(4 * width, width, bias=False),
                }
            )
            self.blocks.append(block)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, len(SYMBOLS), bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.place.weight[: tokens_BT.shape[1]]
        for b in self.blocks:
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for t in b["qkv"](b["norm1"](x)).chunk(3, dim=-1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + b["out"](mixed.transpose(1, 2).flatten(2))
            x = x + b["down"](F.gelu(b["up"](b["norm2"](x))))
        return self.head(self.norm(x))


def characters(limit: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """Return training and held-out symbols of the standard library's sources."""
    code = {c: i for i, c in enumerate(SYMBOLS)}
    text, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found = [code[c] for c in path.read_text(errors="ignore") if c in code]
        text.append(torch.tensor(found, dtype=torch.uint8))
        total += len(found)
        if total > limit:
            break
    every = list(range(len(text)))
    held = [i for i in every if i % 10 == 9]
    kept = [i for i in every if i % 10 != 9]
    return torch.cat([text[i] for i in kept]), torch.cat([text[i] for i in held])


@dataclass(frozen=True)
class Arm:
    """What synchronizes the workers.

    Attributes:
        kind: adamw, adams (dense), scape, topk, dgc, demo or powersgd.
        density: fraction sent.
        unmasked, lag, source, frozen, move_all: as for `Scape`.
        rank: of powersgd.
        keep: DCT components per 64 of demo.
    """

    kind: str
    density: float = 1.0
    unmasked: str = "transfer"
    lag: int = 1
    source: str = "owner"
    frozen: bool = False
    move_all: bool = False
    rank: int = 4
    keep: int = 4


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        arm: what synchronizes.
        lr: peak learning rate.
        steps: optimizer steps.
        dense_steps: dense steps at the start.
        ramp_steps: steps from dense to the arm's density.
        seed: of weights and batches.
        workers: N.
        width: of the model.
        batch: sequences per worker and step.
    """

    arm: Arm
    lr: float
    steps: int
    dense_steps: int = 0
    ramp_steps: int = 0
    seed: int = 0
    workers: int = 4
    width: int = 64
    batch: int = BATCH


@dataclass
class Outcome:
    """What a run gave."""

    val_loss: float
    val_curve: list[tuple[int, float]]
    overlap: float | None
    wire_bytes: int
    dense_bytes: int
    wall_s: float
    state: dict = field(default_factory=dict)


class Dense:
    """Dense data parallelism in one process: the workers' gradients add up on one model."""

    def __init__(self, model: nn.Module, num_workers: int, kind: str, lr: float) -> None:
        self.num_workers = num_workers
        params = list(model.parameters())
        if kind == "adams":
            self.optimizer = AdamS(params, lr=lr)
        else:
            groups = [
                {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), foreach=True)
        self.param_groups = self.optimizer.param_groups
        self.params = params

    def collect(self, worker: int) -> None:
        """Leave the gradient where it adds up."""

    def step(self) -> None:
        torch._foreach_div_([p.grad for p in self.params], self.num_workers)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metrics(self) -> dict:
        return {}


def make_sync(plan: Plan, model: nn.Module, ledger: Ledger):
    """Return what has collect, step, param_groups (and perhaps metrics)."""
    arm, named, n = plan.arm, list(model.named_parameters()), plan.workers
    if arm.kind in ("adamw", "adams"):
        return Dense(model, n, arm.kind, plan.lr)
    baselines = {
        "dgc": Dgc(arm.density, ramp_steps=plan.dense_steps // 4),
        "demo": Demo(k=arm.keep),
        "powersgd": PowerSgd(arm.rank),
    }
    if arm.kind in baselines:
        return SyncSimulator(
            named, n, baselines[arm.kind], lr=plan.lr, weight_decay=0.1, ledger=ledger
        )
    rule = TopkAdamw() if arm.kind == "topk" else Adams(arm.unmasked, arm.frozen, arm.move_all)
    options = Options(
        density=Density(arm.density, plan.dense_steps, plan.ramp_steps),
        lag=arm.lag,
        masking=Masking(source=arm.source, run_key=plan.seed),
    )
    return Simulator(named, n, lr=plan.lr, rule=rule, options=options, ledger=ledger)


def lr_at(plan: Plan, step: int) -> float:
    """Return the learning rate of a step (from 0)."""
    warm = max(1, plan.steps // 10)
    if step < warm:
        return plan.lr * (0.01 + 0.99 * step / warm)
    progress = (step - warm) / max(1, plan.steps - 1 - warm)
    return plan.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def batch(text: Tensor, plan: Plan, step: int, worker: int) -> Tensor:
    """Return characters [B, T + 1] drawn from (seed, step, worker)."""
    key = (plan.seed * 1_000_003 + step) * 64 + worker
    generator = torch.Generator().manual_seed(key)
    starts = torch.randint(0, text.numel() - SEQ - 1, (plan.batch,), generator=generator)
    return text[starts[:, None] + torch.arange(SEQ + 1)].long()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out(model: nn.Module, text: Tensor, rows: int = 256) -> float:
    """Return the held-out loss in nats on the same characters for every run."""
    starts = torch.linspace(0, text.numel() - SEQ - 2, rows).long()
    every = text[starts[:, None] + torch.arange(SEQ + 1)].long()
    return sum(loss_of(model, part).item() * len(part) for part in every.split(64)) / rows


def run(plan: Plan, data: tuple[Tensor, Tensor], points: int = 10) -> Outcome:
    """Train once."""
    torch.manual_seed(plan.seed)
    model, ledger = Toy(plan.width), Ledger()
    sync = make_sync(plan, model, ledger)
    started, curve, overlaps = time.perf_counter(), [], []
    every = max(1, plan.steps // points)
    for step in range(plan.steps):
        for group in sync.param_groups:
            group["lr"] = lr_at(plan, step)
        for worker in range(plan.workers):
            loss_of(model, batch(data[0], plan, step, worker)).backward()
            sync.collect(worker)
        sync.step()
        if step > plan.dense_steps + plan.ramp_steps + 2 and step % 20 == 0:
            figures = sync.metrics() if hasattr(sync, "metrics") else {}
            overlaps += [figures["mask_overlap"]] if "mask_overlap" in figures else []
        if (step + 1) % every == 0 or step + 1 == plan.steps:
            curve.append((step + 1, held_out(model, data[1])))
    wire = sum(ledger[link].wire_bytes for link in ("gradients", "masks"))
    return Outcome(
        val_loss=curve[-1][1],
        val_curve=curve,
        overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        wire_bytes=wire,
        dense_bytes=ledger["gradients"].dense_bytes,
        wall_s=time.perf_counter() - started,
    )


def limit_threads() -> None:
    """Use one thread: the model is too small for more."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
