"""R replicas that train apart, in one process, on the core that real sites run.

Tasks: `toy`, a character model on Python source (width 64, 4 layers, 96 symbols, batches of 12 x 64
per replica), and `llama`, the trainer's model on a text of the trainer's (`sotu`).

Legend: `R` replicas, `H` inner steps of a round, `B` sequences, `T` tokens.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.scape_toy import SEQ, SYMBOLS, Toy, characters
from thinwire.comm.ledger import all_reduce_sent
from thinwire.schedules import WarmupCosine
from thinwire.sparseloco import Options, Partition, simulate_round
from thinwire.sparseloco.diloco import Nesterov
from thinwire.sparseloco.table import HEADER_NBYTES
from thinwire.train.config import Model
from thinwire.train.data import TrainBatches, held_out_batch
from thinwire.train.model import build
from thinwire.train.passes import token_loss
from thinwire.train.sources import load_corpus


@dataclass(frozen=True)
class Arm:
    """How replicas agree.

    Attributes:
        kind: "ddp" (mean gradients, every step), "dense" (outer Nesterov SGD on dense means) or
            "sparse" (SparseLoCo).
        every: H.
        alpha, momentum: of the dense outer step.
        options: of SparseLoCo.
    """

    kind: str
    every: int = 15
    alpha: float = 1.0
    momentum: float = 0.0
    options: Options = field(default_factory=Options)


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        val_loss: held-out loss of the shared weights, nats.
        curve: (step, loss) at the ends of some rounds.
        wire_bytes: sent by one replica.
        dense_bytes: what all-reducing fp32 gradients every step would have sent.
        senders: replicas per element sent by any, mean over rounds (sparse arms).
        wall_s: seconds.
    """

    val_loss: float
    curve: list[tuple[int, float]]
    wire_bytes: int
    dense_bytes: int
    senders: float | None
    wall_s: float


class ToyTask:
    """Characters of Python source."""

    def __init__(self, batch: int = 12) -> None:
        self.train, held = characters()
        self.batch = batch
        starts = torch.linspace(0, held.numel() - SEQ - 2, 256).long()
        self.held = torch.stack([held[s : s + SEQ + 1] for s in starts]).long()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Toy(layers=4)

    def loss(self, model: nn.Module, replica: int, replicas: int, step: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * replicas + replica)
        last = self.train.numel() - SEQ - 1
        starts = torch.randint(0, last, (self.batch,), generator=generator)
        rows = torch.stack([self.train[s : s + SEQ + 1] for s in starts]).long()
        return _loss(model, rows)

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        return _loss(model, self.held).item()


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.reshape(-1, len(SYMBOLS)), rows[:, 1:].reshape(-1))


class LlamaTask:
    """The trainer's model; replicas read disjoint parts of its global batches."""

    def __init__(self, source: str, batch: int = 8, seq_len: int = 128) -> None:
        self.corpus, self.batch, self.seq_len = load_corpus(source), batch, seq_len
        self._batches: dict[tuple[int, int], TrainBatches] = {}
        self.held = held_out_batch(self.corpus, seq_len, 256, 0, 1)

    def model(self, seed: int) -> nn.Module:
        return build(Model(), self.seq_len, seed)

    def loss(self, model: nn.Module, replica: int, replicas: int, step: int, seed: int) -> Tensor:
        key = seed, replicas
        if key not in self._batches:
            size = self.batch * replicas
            self._batches[key] = TrainBatches(self.corpus, self.seq_len, size, seed)
        batches = self._batches[key]
        batches.position = step * batches.batch_seqs
        x_BT, y_BT = batches.share(replica, replicas)
        return token_loss(model(x_BT), y_BT)

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        x_BT, y_BT, count = self.held
        parts = zip(x_BT.split(32), y_BT.split(32), strict=True)
        return sum(token_loss(model(x), y, "sum").item() for x, y in parts) / count


Task = ToyTask | LlamaTask


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), foreach=True)


class Replicas:
    """R local models, their optimizers, and the shared weights."""

    def __init__(self, model: nn.Module, arm: Arm, lr: float, count: int) -> None:
        self.arm, self.count = arm, count
        num_models = 1 if arm.kind == "ddp" else count
        self.models = [copy.deepcopy(model) for _ in range(num_models)]
        self.optimizers = [adamw(m, lr) for m in self.models]
        self.numel = sum(p.numel() for p in model.parameters())
        self.wire_bytes, self.ratios = 0, []
        theta = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.parts: list[Partition] = []
        if arm.kind == "sparse":
            ids = range(count)
            self.parts = [Partition(theta, arm.options, replica=r, roster=ids) for r in ids]
        elif arm.kind == "dense":
            self.rule = Nesterov(theta, arm.alpha, arm.momentum)

    def step(self, task: Task, step: int, seed: int, lr: float) -> None:
        """Do one inner step on every replica."""
        for r in range(self.count):
            model, optimizer = (x[r % len(x)] for x in (self.models, self.optimizers))
            for group in optimizer.param_groups:
                group["lr"] = lr
            share = self.count if self.arm.kind == "ddp" else 1
            (task.loss(model, r, self.count, step, seed) / share).backward()
            if share == 1 or r == self.count - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if self.arm.kind == "ddp":
            self.wire_bytes += all_reduce_sent(4 * self.numel, self.count)

    @torch.no_grad()
    def sync(self) -> None:
        """End a round."""
        local = [dict(m.named_parameters()) for m in self.models]
        if self.arm.kind == "dense":
            theta = self.rule.theta
            deltas = {n: sum(theta[n] - w[n] for w in local) / self.count for n in theta}
            self.rule.step(deltas)
            theta = self.rule.theta
            self.wire_bytes += all_reduce_sent(4 * self.numel, self.count)
        else:
            start = self.parts[0].theta
            calls: list[Callable[[str], Tensor]] = [
                (lambda name, w=w: start[name] - w[name]) for w in local
            ]
            simulate_round(self.parts, calls, [1] * self.count, tamper=self._look)
            theta = self.parts[0].theta
            self.wire_bytes += self.parts[0].table.message_nbytes * (self.count - 1)
        for weights in local:
            for name, p in weights.items():
                p.copy_(theta[name])

    def _look(self, receiver: int, messages: dict[int, Tensor]) -> dict[int, Tensor]:
        """Count, once per round, how many replicas sent an element that any sent."""
        if receiver == 0:
            sent = union = 0
            for record in (r for r in self.parts[0].table.records if r.sparse):
                at = [record.decode(m[HEADER_NBYTES:])[0] for m in messages.values()]
                every = torch.cat([a for a in at if a is not None])
                sent, union = sent + every.numel(), union + every.unique().numel()
            self.ratios.append(sent / union)
        return messages


def run(
    task: Task, arm: Arm, lr: float, steps: int, seed: int, workers: int = 4, warmup: int = 40
) -> Outcome:
    """Train and return the held-out loss of the shared weights."""
    began = time.perf_counter()
    replicas = Replicas(task.model(seed), arm, lr, workers)
    schedule = WarmupCosine(peak=lr, total_steps=steps, warmup_steps=min(warmup, steps // 5))
    curve = []
    for step in range(steps):
        replicas.step(task, step, seed, schedule(step))
        ends = arm.kind != "ddp" and ((step + 1) % arm.every == 0 or step + 1 == steps)
        if ends:
            replicas.sync()
        if (step + 1) % max(arm.every, steps // 10) == 0 and step + 1 < steps:
            curve.append((step + 1, task.held_out(replicas.models[0])))
    loss = task.held_out(replicas.models[0])
    return Outcome(
        val_loss=loss if math.isfinite(loss) else float("inf"),
        curve=[*curve, (steps, loss)],
        wire_bytes=replicas.wire_bytes,
        dense_bytes=all_reduce_sent(4 * replicas.numel, workers) * steps,
        senders=sum(replicas.ratios) / len(replicas.ratios) if replicas.ratios else None,
        wall_s=time.perf_counter() - began,
    )
