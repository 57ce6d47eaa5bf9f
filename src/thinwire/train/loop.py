"""The training loop, run by every rank inside an initialized process group.

One step:
1. Forward and backward over this rank's share of the global batch (`passes`).
2. Average gradients over replicas (`gradients`).
3. One all-reduce over the world of (squared norm, loss): all ranks see the same numbers, so they
   clip alike, and stop alike when the watchdog finds the run lost.
4. Clip, optimizer step, a line of metrics; evaluation and checkpoint when due.
"""

import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from tqdm import tqdm

from thinwire import comm, eco, taco
from thinwire.comm import Ledger
from thinwire.scape import Scape
from thinwire.scape.engine import SparseOptimizer
from thinwire.train.agreement import load_alike
from thinwire.train.auto import AutoRun, choose_systems
from thinwire.train.boundaries import Boundaries
from thinwire.train.checkpoint import Checkpointer
from thinwire.train.config import Config
from thinwire.train.data import TrainBatches, bits_per_byte, held_out_batch
from thinwire.train.gradients import (
    local,
    local_square_norm,
    scale_gradients,
)
from thinwire.train.mesh import Layout, make_layout, parallel_model
from thinwire.train.metrics import MetricsFile, peak_nbytes, versions, write_run
from thinwire.train.model import Transformer
from thinwire.train.optim import lr_schedule
from thinwire.train.outer import MixedSystem, OuterSystem, attach_outer
from thinwire.train.parse import config_hash, to_dict
from thinwire.train.passes import Pass, make_pass
from thinwire.train.replicas import Sync, make_replicas
from thinwire.train.saved import (
    as_chosen,
    lost_steps,
    newest_checkpoint,
    read_meta,
    refuse_to_mix,
)
from thinwire.train.sources import Corpus
from thinwire.train.systems import System, attach_systems, full_precision, layer_errors
from thinwire.train.watchdog import Watchdog

__all__ = ["Trainer", "train"]


def train(
    config: Config,
    *,
    resume: Path | None = None,
    device: torch.device | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train, and return the content of run.json; collective over the default group.

    Args:
        config: what to run, the same on every rank.
        resume: a checkpoint, or a run's folder to take the newest of.
        device: where this rank computes; default CPU.
        progress: show a progress bar on rank 0.

    Raises:
        ConfigError, DataError, CheckpointError: see those; before the first step.
        NonFiniteError, StuckError: the run cannot go on.
        ContractError: a compressed link carried nothing by the last step (run.json is written all
            the same).
    """
    if resume is not None:
        config = as_chosen(config, read_meta(newest_checkpoint(resume))["config"])
    trainer = Trainer.build(config, device or torch.device("cpu"))
    if resume is not None:
        trainer.restore(resume)
    else:
        refuse_to_mix(Path(config.out))
    run = trainer.run(progress)
    # A run that `stop_after` ends may still be in its schedule's dense steps or in its first outer
    # round: its resumption, which goes on with the same books, is held to the contract.
    if trainer.step >= config.steps:
        trainer.ledger.check()
    return run


@dataclass
class Trainer:
    """The parts of one rank's run.

    Attributes:
        config: what to run.
        layout: where this rank stands.
        model: this rank's part of the model.
        ledger: books every byte this rank sends.
        systems: attached compression by config node.
        optimizer: over this rank's parameters.
        batches: training data and its position.
        sync: averages gradients over replicas, or leaves that to the optimizer.
        clips: the optimizer bounds the gradient norm itself.
        passes: forward and backward.
        watchdog: stops a lost run.
        auto: what was chosen where config.compress was "auto"; `config` holds the outcome.
        earlier: what a resumed run chose when it began, and measured until its checkpoint.
        step: finished steps.
    """

    config: Config
    layout: Layout
    model: Transformer
    ledger: Ledger
    systems: dict[str, System]
    optimizer: Optimizer
    batches: TrainBatches
    sync: Sync
    clips: bool
    passes: Pass
    watchdog: Watchdog
    auto: AutoRun | None = None
    earlier: dict[str, Any] | None = None
    step: int = 0
    wall_s: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, config: Config, device: torch.device) -> "Trainer":
        """Set everything up; collective.

        Raises:
            ConfigError, DataError: on every rank alike.
        """
        corpus = load_alike(config)
        layout = make_layout(config, device)
        auto = None
        if config.compress == "auto":
            config, auto = choose_systems(
                config, layout, lambda tried: cls._assemble(tried, layout, None, corpus)
            )
        return cls._assemble(config, layout, auto, corpus)

    @classmethod
    def _assemble(
        cls, config: Config, layout: Layout, auto: AutoRun | None, corpus: Corpus
    ) -> "Trainer":
        data = config.data
        batches = TrainBatches(corpus, data.seq_len_tokens, data.batch_seqs, config.seed)
        ledger = Ledger(timing=config.timing)
        model = parallel_model(config, layout, ledger)
        systems = attach_systems(config, layout, model, ledger)
        replicas = make_replicas(config, layout, model, ledger)
        if replicas.system is not None:
            systems["replicas"] = replicas.system
        boundaries = systems.get("pipeline")
        assert boundaries is None or isinstance(boundaries, Boundaries)
        if boundaries is not None:
            boundaries.attach(replicas.optimizer)
        outer = attach_outer(config, layout, model, replicas.optimizer, ledger, boundaries)
        if outer is not None:
            systems["outer"] = outer
        return cls(
            config=config,
            layout=layout,
            model=model,
            ledger=ledger,
            systems=systems,
            optimizer=replicas.optimizer,
            batches=batches,
            sync=replicas.sync,
            clips=replicas.clips,
            passes=make_pass(config, layout, replicas.forward, replicas.sync, ledger, boundaries),
            watchdog=Watchdog(config.watchdog),
            auto=auto,
        )

    @property
    def checkpointer(self) -> Checkpointer:
        """Return what saves and restores this run."""
        folder = Path(self.config.out) / "checkpoints"
        return Checkpointer(folder, self.config, self.model, self.optimizer, self.systems)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            ConfigError: there is none.
            CheckpointError: unreadable or of another configuration.
        """
        meta = self.checkpointer.load(newest_checkpoint(path))
        lost = lost_steps(meta, self.config, self.layout.sizes["dp_replicate"])
        if lost and dist.get_rank() == 0:
            sys.stdout.write(f"{lost}\n")
        self.step, self.batches.position = meta["step"], meta["position"]
        self.wall_s, self.earlier = meta["wall_s"], meta.get("auto")
        # Another number of ranks has no ledger of its own to continue: ranks beyond take turns.
        saved = meta["ledgers"]
        self.ledger.load_totals(saved[dist.get_rank() % len(saved)])
        self.watchdog.streak, streak_loss = meta["streak"]
        self.watchdog.streak_loss = math.nan if streak_loss is None else streak_loss

    def close(self) -> None:
        """Wait for what an optimizer left on its way, and end its threads; the weights stay."""
        if isinstance(self.optimizer, SparseOptimizer):
            self.optimizer.close()

    def run(self, progress: bool) -> dict[str, Any]:
        """Run to the last step (or `stop_after`), write the files, return run.json's content."""
        config, is_writer = self.config, dist.get_rank() == 0
        until = min(config.stop_after or config.steps, config.steps)
        started = time.perf_counter() - self.wall_s
        file = self._metrics_file() if is_writer else None
        bar = tqdm(
            total=until, initial=self.step, disable=not (progress and is_writer), unit="step"
        )
        self.ledger.end_step()
        try:
            while self.step < until:
                record = self.train_step()
                if self.auto is not None and is_writer:
                    self.auto.step(self.step, record["step_s"])
                self._evaluate_if_due(record)
                self.last = record
                if file is not None:
                    file.write(record)
                bar.set_postfix(loss=f"{record['loss']:.3f}", refresh=False)
                bar.update()
                if is_writer and not progress:
                    _tell(record, until)
                self.wall_s = time.perf_counter() - started
                self._save_if_due(until)
        finally:
            bar.close()
            if file is not None:
                file.close()
        step_s = file.step_s if file is not None else []
        run = self._summary(step_s)
        if is_writer:
            write_run(Path(config.out), run)
        return run

    def train_step(self) -> dict[str, Any]:
        """Do one optimizer step and return its line of metrics; collective."""
        start = time.perf_counter()
        layout, params = self.layout, list(self.model.parameters())
        schedule = lr_schedule(self.config)
        lr = schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if "next_lr" in group:
                group["next_lr"] = schedule(self.step + 1)
        x_BT, y_BT = self.batches.share(layout.data_rank, layout.data_ranks)
        loss = self.passes.train(x_BT.to(layout.device), y_BT.to(layout.device))
        self.sync.finish()
        taco.sum_partial_gradients(params, ledger=self.ledger)
        boundaries = self._boundaries
        if boundaries is not None:
            boundaries.project_gradients()
        mean_loss, grad_norm, own_norm = self._agree(loss, local_square_norm(params, layout))
        self.watchdog.check(self.step, mean_loss, grad_norm)
        max_norm = self.config.optim.max_norm
        if max_norm and own_norm > max_norm and not self.clips:
            scale_gradients(params, max_norm / own_norm)
        outer = self._outer
        if outer is not None:
            outer.count(x_BT.numel() * layout.sizes["dp_shard"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batches.advance()
        self.step += 1
        if outer is not None and self.step == self.config.steps:
            outer.finish()
        self._check_replicas_if_due()
        if boundaries is not None:
            boundaries.check_health()
        if isinstance(outer, MixedSystem):
            outer.measure()
        record: dict[str, Any] = {
            "step": self.step,
            "loss": mean_loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": self.tokens,
            "step_s": time.perf_counter() - start,
            "wire": self.ledger.end_step(),
        }
        for system in self.systems.values():
            record |= system.metrics()
        return record

    @property
    def _outer(self) -> OuterSystem | None:
        system = self.systems.get("outer")
        return system if isinstance(system, OuterSystem) else None

    def _agree(self, loss: torch.Tensor, square_norm: torch.Tensor) -> tuple[float, float, float]:
        """Return mean loss, gradient norm, and the norm that bounds this replica's step.

        Replicas that train apart have a norm each (the second value is their root mean square), and
        one that is not finite doesn't end the run: its outer round leaves it out.
        """
        layout = self.layout
        # Each data rank's loss is held by its tp ranks (on the last stage): count it once.
        weight = layout.data_ranks * layout.sizes["tp"]
        if self._outer is None:
            square, mean = self._sum(torch.stack([square_norm, loss.double() / weight]))
            return mean, math.sqrt(square), math.sqrt(square)
        count, own = layout.sizes["dp_replicate"], layout.index("dp_replicate")
        values = torch.zeros(2, count, dtype=torch.float64, device=layout.device)
        values[:, own] = torch.stack([square_norm * count, loss.double() * count / weight])
        sums = self._sum(values.flatten())
        squares, losses = sums[:count], sums[count:]
        finite = [i for i in range(count) if math.isfinite(squares[i]) and math.isfinite(losses[i])]
        kept = finite or range(count)
        mean_square = statistics.fmean(squares[i] for i in kept)
        norm = squares[own] if own in finite else math.nan
        return statistics.fmean(losses[i] for i in kept), math.sqrt(mean_square), math.sqrt(norm)

    def _check_replicas_if_due(self) -> None:
        every = self.config.systems.storage.check_every_steps
        if every and self.step % every == 0 and self.layout.sizes["dp_replicate"] > 1:
            eco.check_replicas(self.model, self.layout.group("dp_replicate"), self.ledger)

    @property
    def tokens(self) -> int:
        """Return the tokens trained on so far, over all ranks."""
        return self.step * self.config.data.batch_seqs * self.config.data.seq_len_tokens

    def evaluate(self) -> float:
        """Return the held-out loss in nats, the same on every rank; collective."""
        layout, cfg = self.layout, self.config.evaluation
        x_BT, y_BT, num_tokens = held_out_batch(
            self.batches.corpus,
            self.config.data.seq_len_tokens,
            cfg.num_seqs,
            layout.data_rank,
            layout.data_ranks,
        )
        rows = max(1, self.config.data.batch_seqs // layout.data_ranks)
        total = torch.zeros((), dtype=torch.float64, device=layout.device)
        self.model.eval()
        for x, y in zip(x_BT.split(rows), y_BT.split(rows), strict=True):
            total += self.passes.held_out(x.to(layout.device), y.to(layout.device)).double()
        self.model.train()
        (sum_nats,) = self._sum(total[None] / layout.sizes["tp"])
        return sum_nats / num_tokens

    def _evaluate_if_due(self, record: dict[str, Any]) -> None:
        every = self.config.evaluation.every_steps
        if self.step < self.config.steps and not (every and self.step % every == 0):
            return
        if isinstance(outer := self._outer, MixedSystem):
            with outer.shared_weights(self.config.evaluation.boundaries):
                loss = self.evaluate()
        elif self.config.evaluation.weights == "master":
            with full_precision(self.systems):
                loss = self.evaluate()
        else:
            loss = self.evaluate()
        record |= {
            "val_loss": loss,
            "val_bits_per_byte": bits_per_byte(loss),
            "eval_wire": self.ledger.end_step(),
        }

    def _save_if_due(self, until: int) -> None:
        every = self.config.checkpoints.every_steps
        stops = self.step == until and self.config.stop_after > 0
        if not stops and not (every and self.step % every == 0):
            return
        streak_loss = self.watchdog.streak_loss
        meta = {
            "position": self.batches.position,
            "wall_s": self.wall_s,
            "ledgers": _of_every_rank(self.ledger.to_dict()),
            "streak": [self.watchdog.streak, None if math.isnan(streak_loss) else streak_loss],
            "mesh": self.layout.sizes,
            "auto": self._choice(),
        }
        self.checkpointer.save(self.step, meta)

    def _sum(self, values: torch.Tensor) -> list[float]:
        total = comm.all_reduce(values, None, link="scalars", ledger=self.ledger)
        return total.tolist()

    def _metrics_file(self) -> MetricsFile:
        return MetricsFile(Path(self.config.out), self.step, self.config.tensorboard)

    def _summary(self, step_s: list[float]) -> dict[str, Any]:
        errors = layer_errors(self.systems)
        ledgers = _of_every_rank(self.ledger.to_dict())
        return {
            "config": to_dict(self.config),
            "config_hash": config_hash(self.config),
            "versions": versions(),
            "mesh": self.layout.sizes,
            "num_ranks": dist.get_world_size(),
            "device": self.layout.device.type,
            "data": self.batches.corpus.describe(),
            "result": self._result(step_s),
            "ledger": ledgers[0],
            "ledger_ranks": ledgers,
            "exemptions": _distinct(
                _of_every_rank([_plain(e) for e in self.ledger.all_exemptions()])
            ),
            "memory": self._memory(),
            "layer_errors": errors,
        } | ({} if (choice := self._choice()) is None else {"auto": choice})

    def _choice(self) -> dict[str, Any] | None:
        """Return what compress "auto" chose, in this part of the run or before it was resumed."""
        return self.earlier if self.auto is None else self.auto.to_dict()

    def _result(self, step_s: list[float]) -> dict[str, Any]:
        return {
            "steps": self.step,
            "tokens": self.tokens,
            "train_loss": self.last.get("loss"),
            "val_loss": self.last.get("val_loss"),
            "val_bits_per_byte": self.last.get("val_bits_per_byte"),
            "val_weights": self.config.evaluation.weights,
            "val_boundaries": self._val_boundaries(),
            "wall_s": self.wall_s,
            "step_s_median": statistics.median(step_s) if step_s else None,
        }

    @property
    def _boundaries(self) -> Boundaries | None:
        system = self.systems.get("pipeline")
        return system if isinstance(system, Boundaries) else None

    def _val_boundaries(self) -> str | None:
        return self.config.evaluation.boundaries if self._boundaries is not None else None

    def _memory(self) -> dict[str, int]:
        """Return this rank's measured bytes, and the model's parameters."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        with torch.device("meta"):
            whole = Transformer(self.config.model, self.config.data.seq_len_tokens)
        stored = [p for p in self.model.parameters() if eco.local_quantized(p) is not None]
        return {
            "weight_bytes": eco.weight_nbytes(self.model),
            "optimizer_bytes": eco.optimizer_nbytes(self.optimizer),
            "peak_bytes": peak_nbytes(self.layout.device),
            "params": sum(p.numel() for p in whole.parameters()),
            "stored_params": sum(local(p.detach()).numel() for p in stored),
        } | (self.optimizer.memory() if isinstance(self.optimizer, Scape) else {})


def _tell(record: dict[str, Any], until: int) -> None:
    """Write a line at the first step and ten times over the run: logs have no progress bar."""
    step = record["step"]
    if step == 1 or step % max(1, until // 10) == 0:
        sys.stdout.write(f"step {step}/{until}: loss {record['loss']:.4f}\n")
        sys.stdout.flush()


def _of_every_rank(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _distinct(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what any rank exempts, each tensor and reason once: stages and replicas differ."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for exemption in (e for rank in ranks for e in rank):
        name = exemption["name"]
        what = exemption["reason"] if name.endswith(" calls") else name
        found.setdefault((exemption["link"], what), exemption)
    return list(found.values())


def _plain(exemption: Any) -> dict[str, Any]:
    return {name: getattr(exemption, name) for name in ("link", "name", "reason", "nbytes")}
