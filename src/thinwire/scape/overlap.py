"""Send the values of a run while backward still computes the others.

1. Hooks count a run's gradients. Runs are launched from the last to the first, never out of order.
2. A launch gathers x, appends the run's own bad word, and hands the mean to one ordered thread.
3. `finish`, called by `step`, launches what is left and collects the means. State changes only
   then, so a bad word in any run stops them all.
"""

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.scape.layout import Run

if TYPE_CHECKING:
    from thinwire.scape.engine import SparseOptimizer

__all__ = ["Overlap"]


class Overlap:
    """Early launches of one optimizer's values.

    Attributes:
        enabled: False lets gradients accumulate without launching anything.
        launches: (run index, seconds after the first hook, from a hook?) of the last step.
    """

    def __init__(self, optimizer: "SparseOptimizer") -> None:
        self.optimizer = optimizer
        self.enabled = True
        self.launches: list[tuple[int, float, bool]] = []
        self._order = list(reversed(range(len(optimizer.worker.runs))))
        self._handles: list[Any] = []
        self._reset()
        for i, run in enumerate(optimizer.worker.runs):
            for entry in run.entries:
                hook = self._hook_for(i, entry.name)
                self._handles.append(entry.param.register_post_accumulate_grad_hook(hook))

    def _reset(self) -> None:
        runs = self.optimizer.worker.runs
        self._missing = [{e.name for e in run.entries} for run in runs]
        self._sent: dict[int, Tensor] = {}
        self._futures: dict[int, Any] = {}
        self._first_s: float | None = None

    def _hook_for(self, index: int, name: str) -> Any:
        def hook(_: Tensor) -> None:
            if self.enabled:
                self._ready(index, name)

        return hook

    @torch.no_grad()
    def _ready(self, index: int, name: str) -> None:
        if name not in self._missing[index]:
            raise ConfigError(
                f"the gradient of {name!r} was completed twice before step(): with overlap=True "
                "wrap all but the last micro-step in `with optimizer.no_sync():`"
            )
        if self._first_s is None:
            self._first_s = time.perf_counter()
            self.launches = []
            self.optimizer.begin()
        self._missing[index].discard(name)
        while len(self._futures) < len(self._order):
            nxt = self._order[len(self._futures)]
            if self._missing[nxt]:
                break
            self._launch(nxt, from_hook=True)

    def _launch(self, index: int, *, from_hook: bool) -> None:
        optimizer = self.optimizer
        run: Run = optimizer.worker.runs[index]
        x, bad = optimizer.worker.outgoing(run)
        message, exchange = torch.cat((x, bad)), optimizer.exchange
        self._sent[index] = x
        assert exchange.thread is not None
        self._futures[index] = exchange.thread.submit(
            lambda: exchange.mean(message, early=True), message.device
        )
        now = time.perf_counter()
        self.launches.append((index, now - (self._first_s or now), from_hook))

    def finish(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return x and the mean per run, and the runs' bad words."""
        if self._first_s is None:
            self.launches = []
        for index in self._order[len(self._futures) :]:
            self._launch(index, from_hook=False)
        report = self.optimizer.report
        report.values_launched_s = time.perf_counter()
        indices = range(len(self._order))
        try:
            means = [self._futures[i].wait() for i in indices]
            sent = [self._sent[i] for i in indices]
        finally:
            self._reset()
        report.values_waited(self.optimizer.ledger)
        return sent, [p[:-1] for p in means], torch.cat([p[-1:] for p in means])

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
