"""N workers in one process, through the same code as N ranks: for research without processes.

Each worker is a `Worker`, as in `SparseOptimizer`; only the messages move in memory, with the sums
and roundings that the collectives make.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Ledger
from thinwire.errors import NonFiniteError
from thinwire.kernels.finite import all_finite
from thinwire.scape.engine import Options
from thinwire.scape.layout import Entry, list_entries, state_dtype
from thinwire.scape.reduce import Books, ValueWire
from thinwire.scape.report import MaskReport
from thinwire.scape.rules import Adams, Rule
from thinwire.scape.table import DENSE_FROM, Piece, build_table
from thinwire.scape.worker import Worker

__all__ = ["Simulator"]


class Simulator:
    """Data-parallel training by N workers on one copy of a model.

    Call backward on each worker's batch and `collect` after each, then `step`. Worker 0 holds the
    model's own parameters, the others hold copies.

    Args:
        params: parameters, named ones, or parameter groups.
        num_workers: N.
        lr: learning rate; change it through `param_groups`.
        rule: what a step computes; SCAPE's by default.
        options: as for `Scape`; process-bound ones (overlap, offload, mode) have no meaning here.
        betas: as for `Scape`.
        eps: as for `Scape`.
        weight_decay: as for `Scape`.
        ledger: books what one rank would have sent.

    Example:
        >>> sim = Simulator(model.named_parameters(), 8, lr=3e-3)
        >>> for worker in range(8):
        ...     loss(model(batch[worker])).backward()
        ...     sim.collect(worker)
        >>> sim.step()
    """

    def __init__(
        self,
        params: Any,
        num_workers: int,
        *,
        lr: float,
        rule: Rule | None = None,
        options: Options | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        ledger: Ledger | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # torch's base class sorts out the forms that `params` may have.
        self.param_groups = torch.optim.Optimizer(params, defaults).param_groups
        self.options = options or Options()
        self.entries = list_entries(self.param_groups)
        self.table = build_table(
            [e.name for e in self.entries],
            [e.param.shape for e in self.entries],
            num_workers,
            dense_below=self.options.dense_below,
            dense=self.options.dense,
            partition=self.options.partition,
        )
        doubles = state_dtype(self.entries[0].param) == torch.float64
        self.wire = ValueWire(torch.float64 if doubles else self.options.values_dtype)
        self.books = Books(ledger, self.table, self.wire)
        self.books.declare()
        self.workers = [
            Worker(
                self.entries if rank == 0 else _copies(self.entries),
                self.table,
                rank,
                rule or Adams(),
                self.options.masking,
                residual_dtype=None if doubles else self.options.residual_dtype,
                run_bytes=self.options.run_bytes,
            )
            for rank in range(num_workers)
        ]
        self.report = MaskReport(self.table, self.options.masking.mask_format)
        self._messages: list[Tensor | None] | None = None
        self._grads: list[dict[str, Tensor | None]] = [{} for _ in self.workers]

    @property
    def num_steps(self) -> int:
        """Return the finished steps."""
        return self.workers[0].step

    def density(self, step: int) -> float:
        """Return the density of `step` (from 0); the first step sends everything."""
        return 1.0 if step == 0 else float(self.options.schedule(step))

    def collect(self, worker: int) -> None:
        """Hand the gradients that the model now holds to a worker."""
        for mine, theirs in zip(self.entries, self._params(worker), strict=True):
            grad, mine.param.grad = mine.param.grad, None
            self._grads[worker][theirs.name] = grad

    def _params(self, worker: int) -> list[Entry]:
        return [e for run in self.workers[worker].runs for e in run.entries]

    @torch.no_grad()
    def step(self) -> None:
        """Do one step of all workers.

        Raises:
            NonFiniteError: a gradient holds NaN or infinity ("raise").
        """
        for worker, grads in enumerate(self._grads):
            for entry in self._params(worker):
                entry.param.grad = grads.pop(entry.name, None)
        self._masks_for(self.num_steps)
        scales = self._local_scales()
        if self.options.lag == 0 and self.density(self.num_steps) < DENSE_FROM:
            self._masks_now(scales)
        pairs = [
            [w.outgoing(run, scale) for run in w.runs]
            for w, scale in zip(self.workers, scales, strict=True)
        ]
        sent = [[x for x, _ in rows] for rows in pairs]
        bad = [torch.stack([b for _, b in rows]).amax(0) for rows in pairs]
        mean = self.wire.mean([torch.cat([*xs, b]) for xs, b in zip(sent, bad, strict=True)])
        self.books.values([mean.numel()], self.density(self.num_steps))
        if mean[-1].item() != 0 or not all_finite(mean):
            self._refuse()
            return
        means = list(mean[:-1].split([x.numel() for x in sent[0]]))
        clip = self._reconstructed_clip(means)
        self._commit(sent, means, scales, clip)

    def _commit(
        self,
        sent: list[list[Tensor]],
        means: list[Tensor],
        scales: Sequence[Tensor | None],
        clip: float,
    ) -> None:
        next_density = self.density(self.num_steps + 1)
        for worker, xs, scale in zip(self.workers, sent, scales, strict=True):
            worker.commit(
                xs, [self.wire.quantize(x) for x in xs], means, scale=scale, clip=clip,
                next_density=1.0 if self.options.lag == 0 else next_density,
            )  # fmt: skip
        for entry in (e for i in range(len(self.workers)) for e in self._params(i)):
            entry.param.grad = None
        if self.options.lag == 1 and next_density < DENSE_FROM:
            self._send_masks(self.num_steps)

    def _refuse(self) -> None:
        if self.options.nonfinite == "skip":
            self.report.skipped += 1
            return
        names = {n for w in self.workers for n in w.bad_tensors()}
        raise NonFiniteError(f"NaN or infinity in the gradients of {', '.join(sorted(names))}")

    def _masks_for(self, step: int) -> None:
        density = self.density(step)
        if density >= DENSE_FROM:
            self._on_all(lambda w: w.all_dense())
        elif self.options.masking.source == "random":
            self._take(self.workers[0].random_masks(step + 1, density), density)
        elif self._messages is not None:
            masks = self.workers[0].read_masks(self._messages, step + 1, density)
            self._take(masks, density)
        self._messages = None

    def _take(self, masks: dict[Piece, Tensor], density: float) -> None:
        self.report.taken(self.workers[0].masks(), masks, density)
        self._on_all(lambda w: w.take_masks(masks))

    def _on_all(self, action: Callable[[Worker], None]) -> None:
        for worker in self.workers:
            action(worker)

    def _masks_now(self, scales: Sequence[Tensor | None]) -> None:
        if self.options.masking.source == "random":
            return
        for worker, scale in zip(self.workers, scales, strict=True):
            worker.pick_from_outgoing(self.density(self.num_steps), scale)
        self._send_masks(self.num_steps)
        self._masks_for(self.num_steps)

    def _send_masks(self, step: int) -> None:
        density, masking = self.density(step), self.options.masking
        if masking.source == "random":
            return
        self._messages = [w.mask_message(step + 1, density) for w in self.workers]
        lengths = [0 if m is None else m.numel() for m in self._messages]
        if masking.mask_format != "delta":
            assert lengths == self.workers[0].message_lengths(density)
        else:
            self.books.owners("masks", [4] * len(lengths), dense=False)
        self.report.launched(density, sum(lengths))
        self.books.owners("masks", lengths, dense=False)

    def _local_scales(self) -> list[Tensor | None]:
        how, limit = self.options.clipping, self.options.max_norm
        if how not in ("local", "rms") or limit is None:
            return [None] * len(self.workers)
        squares = [w.square_norm() for w in self.workers]
        if how == "rms":
            total = squares[0].clone()
            for square in squares[1:]:
                total += square
            squares = [total / len(squares)] * len(squares)
        return [(limit / (s.sqrt() + 1e-6)).clamp(max=1.0) for s in squares]

    def _reconstructed_clip(self, means: Sequence[Tensor]) -> float:
        if self.options.clipping != "reconstructed" or self.options.max_norm is None:
            return 1.0
        norm = self.workers[0].gradient_square_norm(means).sqrt().item()
        return min(1.0, self.options.max_norm / (norm + 1e-6))

    def residual_ratio(self, gradients: Sequence[Tensor]) -> float:
        """Return |mean residual| over the norm of the given mean gradients."""
        square = torch.zeros((), dtype=torch.float64)
        for runs in zip(*(w.runs for w in self.workers), strict=True):
            mean = torch.stack([r.state["residual"].float() for r in runs]).mean(0)
            square += mean.double().square().sum()
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
        return (square.sqrt() / norm).item()

    def metrics(self) -> dict[str, float]:
        """Return density, mask forms and the overlap of the last masks."""
        runs = self.workers[0].runs
        sent = sum(run.sent for run in runs) / self.table.numel
        return {"density": self.density(max(0, self.num_steps - 1)), "sent_fraction": sent} | (
            self.report.metrics()
        )


def _copies(entries: Sequence[Entry]) -> list[Entry]:
    return [
        Entry(e.name, nn.Parameter(e.param.detach().clone()), e.group, e.copies) for e in entries
    ]
