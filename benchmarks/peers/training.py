"""Train peers and recipes alike: the same steps, measured by the same code."""

import math
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.peers.methods import PEERS
from thinwire.lab.rounds import take_turns
from thinwire.train.config import Config
from thinwire.train.data import TrainBatches, held_out_batch
from thinwire.train.loop import Trainer
from thinwire.train.model import build
from thinwire.train.optim import lr_schedule
from thinwire.train.parse import from_dict
from thinwire.train.passes import token_loss
from thinwire.train.sources import load_corpus


class PeerTrainer:
    """A peer's training of the trainer's model on the trainer's batches."""

    def __init__(self, name: str, config: Config) -> None:
        self.config, self.step, self._held = config, 0, ExitStack()
        data = config.data
        corpus = load_corpus(data.source)
        self.batches = TrainBatches(corpus, data.seq_len_tokens, data.batch_seqs, config.seed)
        self.built = PEERS[name](config, build(config.model, data.seq_len_tokens, config.seed))
        if self.built.around is not None:
            self._held.enter_context(self.built.around)

    def train_step(self) -> dict[str, Any]:
        """Do one step; return its loss (this rank's) and no booked bytes: peers book none."""
        built, optim = self.built, self.config.optim
        for group in built.optimizer.param_groups:
            lr = lr_schedule(self.config)(self.step)
            # torchao keeps the rate in a tensor, so that its compiled step stays the same.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        x_BT, y_BT = self.batches.share(dist.get_rank(), dist.get_world_size())
        loss = token_loss(built.model(x_BT), y_BT)
        loss.backward()
        if optim.max_norm:
            norm = torch.nn.utils.clip_grad_norm_(built.model.parameters(), optim.max_norm)
            assert math.isfinite(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        built.optimizer.step()
        built.optimizer.zero_grad()
        built.after_step()
        self.batches.advance()
        self.step += 1
        return {"loss": loss.item(), "wire": {}}

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the held-out loss in nats, the mean over the ranks' shares; collective."""
        x_BT, y_BT, count = held_out_batch(
            self.batches.corpus,
            self.config.data.seq_len_tokens,
            self.config.evaluation.num_seqs,
            dist.get_rank(),
            dist.get_world_size(),
        )
        rows = max(1, self.config.data.batch_seqs // dist.get_world_size())
        total = torch.zeros(1, dtype=torch.float64)
        self.built.model.eval()
        for x, y in zip(x_BT.split(rows), y_BT.split(rows), strict=True):
            total += token_loss(self.built.model(x), y, "sum").double()
        self.built.model.train()
        dist.all_reduce(total)
        return float(total) / count

    def close(self) -> None:
        """Leave what the method entered."""
        self._held.close()


def make(name: str, values: dict[str, Any]) -> Trainer | PeerTrainer:
    """Return the trainer of an arm, from the same weights as every other."""
    config = from_dict(values)
    torch.manual_seed(config.seed)
    if name in PEERS:
        return PeerTrainer(name, config)
    return Trainer.build(replace(config, timing=False), torch.device("cpu"))


def losses(payload: dict[str, Any]) -> list[float]:
    """Train one arm after the other; return their held-out losses."""
    found = []
    for name, values in payload["arms"]:
        trainer = make(name, values)
        for _ in range(trainer.config.steps):
            trainer.train_step()
        found.append(trainer.evaluate())
        if isinstance(trainer, PeerTrainer):
            trainer.close()
        del trainer
        # gloo aborts a rank whose peer leaves while a hook's last message is still under way.
        dist.barrier()
    return found


def speeds(payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Train the arms in turn over the lab's links; the answer is that of `lab.rounds`."""
    os.environ["THINWIRE_PEER_HOST"] = "10.77.0.1"
    os.environ["THINWIRE_PEER_OWN"] = f"10.77.0.{dist.get_rank() + 1}"
    return take_turns([make(name, values) for name, values in payload["arms"]], payload)
