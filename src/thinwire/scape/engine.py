"""The optimizer that a sparse rule drives: one value message and one mask exchange per step.

One step, the same on every rank:
1. Wait for the masks that left at the end of the step before.
2. Scale the local gradients, if clipping asks for it.
3. Gather x on the mask, append a word that says whether this rank's gradient is bad, and
   average over the group: the only value collective.
4. Where the mean is bad, which all ranks see alike, raise or skip; no state has changed so far.
5. Update state and weights; pick the masks of the next step for the owned pieces.
6. Launch the mask exchange, which runs under the next forward and backward.

Legend: `E` elements sent by a run, `N` workers.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire import _compat
from thinwire.comm import Ledger
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.kernels.finite import all_finite
from thinwire.scape import consistency, saved
from thinwire.scape.exchange import Arriving, Exchange
from thinwire.scape.layout import list_entries, local, state_dtype
from thinwire.scape.messages import MASK_FORMATS
from thinwire.scape.overlap import Overlap
from thinwire.scape.reduce import Books, ValueWire
from thinwire.scape.report import MaskReport
from thinwire.scape.rules import Rule
from thinwire.scape.store import Offloaded
from thinwire.scape.table import DENSE_FROM, build_table
from thinwire.scape.worker import Masking, Worker
from thinwire.schedules import Density, Schedule

__all__ = ["Options", "SparseOptimizer"]

CLIPS = (None, "local", "rms", "reconstructed")
_OFFLOADS = (None, "residual", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `SparseOptimizer` needs beyond its rule; `Scape` documents each.

    Raises:
        ConfigError: values that do not exist or exclude each other.
    """

    density: float | Schedule = 0.01
    lag: int = 1
    clip: str | None = None
    max_norm: float | None = None
    dense_below: int = 4096
    dense: Collection[str] = ()
    mode: str = "replicated"
    partition: str = "tensor"
    values_dtype: torch.dtype = torch.float32
    residual_dtype: torch.dtype = torch.float32
    masking: Masking = field(default_factory=Masking)
    reduce: str = "ordered"
    overlap: bool = False
    offload: str | None = None
    nonfinite: str = "raise"
    check_every: int = 100
    initial: str = "check"
    run_bytes: int = 25 * 2**20

    def __post_init__(self) -> None:
        choices: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("lag", self.lag, (0, 1)),
            ("clip", self.clip, CLIPS),
            ("mode", self.mode, ("replicated", "sharded")),
            ("mask_format", self.masking.mask_format, MASK_FORMATS),
            ("reduce", self.reduce, ("ordered", "native")),
            ("offload", self.offload, _OFFLOADS),
            ("nonfinite", self.nonfinite, ("raise", "skip")),
            ("initial", self.initial, ("check", "broadcast")),
            ("residual_dtype", self.residual_dtype, (torch.float32, torch.bfloat16)),
            ("values_dtype", self.values_dtype, (torch.float32, torch.bfloat16)),
        ]
        for name, value, known in choices:
            if value not in known:
                listed = ", ".join(str(k) for k in known)
                raise ConfigError(f"{name} must be one of {listed}; got {value!r}")
        if not callable(self.density):
            Density(self.density)  # refuses what lies outside (0, 1]
        if self.clip and not self.max_norm:
            raise ConfigError(f"clip={self.clip!r} needs max_norm, the largest gradient norm")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ConfigError(f"max_norm must be positive, got {self.max_norm}")
        if self.overlap and (self.lag == 0 or self.clipping in ("local", "rms")):
            what = "lag=0" if self.lag == 0 else f"clip={self.clipping!r}"
            raise ConfigError(
                f"overlap=True sends values while backward runs, before {what} can be known: use "
                "lag=1 and clip=None or 'reconstructed', or overlap=False"
            )

    @property
    def clipping(self) -> str | None:
        """Return the clip in force: "local" where only max_norm is given."""
        return self.clip or ("local" if self.max_norm else None)

    @property
    def schedule(self) -> Schedule:
        """Return the density schedule."""
        return self.density if callable(self.density) else Density(self.density)


class SparseOptimizer(Optimizer):
    """Base of `Scape` and of the baselines that share its wire (see the module)."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        rule: Rule,
        options: Options,
        *,
        group: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
        ledger: Ledger | None,
    ) -> None:
        self._built = False
        super().__init__(params, defaults)
        self._built = True
        self.options, self.ledger = options, ledger
        group = group if group is not None else _world()
        shard_group = shard_group or _shard_group(self.param_groups)
        self.entries = list_entries(self.param_groups, shard_group.size() if shard_group else 1)
        num_ranks = 1 if group is None else group.size()
        self.table = build_table(
            [e.name for e in self.entries],
            [local(e.param.detach()).shape for e in self.entries],
            num_ranks,
            dense_below=options.dense_below,
            dense=options.dense,
            partition=options.partition,
        )
        doubles = state_dtype(self.entries[0].param) == torch.float64
        wire = ValueWire(torch.float64 if doubles else options.values_dtype)
        books = Books(ledger, self.table, wire, options.reduce == "ordered")
        books.declare()
        self.exchange = Exchange(
            group, shard_group, wire, ordered=books.ordered, books=books, threaded=options.overlap
        )  # fmt: skip
        consistency.same_table(self.exchange, self.table)
        consistency.same_weights(self.exchange, self.entries, options.initial)
        moved = {"residual": ("residual",), "all": (*rule.shared, "residual"), None: ()}
        self.worker = Worker(
            self.entries,
            self.table,
            self.exchange.rank,
            rule,
            options.masking,
            store=Offloaded(moved[options.offload]) if options.offload else None,
            residual_dtype=None if doubles else options.residual_dtype,
            run_bytes=options.run_bytes,
            last_first=options.overlap,
            sharded=options.mode == "sharded",
        )
        self.report = MaskReport(self.table, options.masking.mask_format)
        self._arriving: Arriving | None = None
        self._masks_taken = True  # the first step sends everything
        self.missing_part = False
        self._step_tensor = torch.zeros(())
        self._expose_state()
        self.overlap = Overlap(self) if options.overlap else None

    def _expose_state(self) -> None:
        """Let torch's optimizer state be views of the flat buffers."""
        for run in self.worker.runs:
            for entry, span in run.spans():
                state: dict[str, Any] = {"step": self._step_tensor}
                for name in self.worker.rule.shared:
                    state[name] = _like_param(run.state[name][span], entry.param)
                self.state[entry.param] = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after construction: masks and owners follow from the first ones.

        Raises:
            ConfigError: called by a user.
        """
        if self._built:
            raise ConfigError(
                "parameter groups are fixed when the optimizer is made: give it all of them at once"
            )
        super().add_param_group(param_group)

    @property
    def num_steps(self) -> int:
        """Return the finished steps."""
        return self.worker.step

    def density(self, step: int) -> float:
        """Return the density of `step` (from 0); the first step sends everything."""
        return 1.0 if step == 0 else float(self.options.schedule(step))

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; collective over the group.

        Returns:
            What the closure returned, if one is given.

        Raises:
            NonFiniteError: on every rank, where a gradient holds NaN or infinity ("raise").
            WireError: ranks disagree on steps or parameters.
            ContractError: replicas drifted (every `check_every` steps).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        started_s = time.perf_counter()
        self.begin()
        scale = self._local_scale()
        if self.options.lag == 0 and not self._sends_all():
            self._masks_now(scale)
        if self.overlap is not None:
            sent, means, words = self.overlap.finish()
            numels = [p.numel() + 1 for p in means]
        else:
            sent, means, words = self._exchange_values(scale)
            numels = [sum(p.numel() for p in means) + 1]
        self.exchange.books.values(numels, self.density(self.worker.step))
        if not self._verdict(means, words):
            return loss
        clip = self._reconstructed_clip(means)
        quantized = [self.exchange.wire.quantize(x) for x in sent]
        self.worker.commit(
            sent, quantized, means, scale=scale, clip=clip,
            next_density=1.0 if self.options.lag == 0 else self.density(self.worker.step + 1),
        )  # fmt: skip
        self._step_tensor.fill_(self.worker.step)
        self._masks_taken = False
        if self.options.mode == "sharded":
            self._gather_weights()
        if self.options.lag == 1 and self._exchanges_masks():
            self._launch_masks(self.worker.step)
        every = self.options.check_every
        if every and self.worker.step % every == 0:
            consistency.same_replicas(self)
        self.report.step_s = time.perf_counter() - started_s
        return loss

    def begin(self) -> None:
        """Make the masks of the coming step ready; `step` and the first backward hook call it."""
        if self.missing_part:
            raise saved.missing_part_error()
        if self._masks_taken:
            return
        self._masks_taken = True
        step = self.worker.step
        if self._sends_all():
            self.worker.all_dense()
        elif self.options.masking.source == "random":
            self._take(self.worker.random_masks(step + 1, self.density(step)))
        elif self._arriving is not None:
            started_s = time.perf_counter()
            messages = self._arriving.wait()
            self.report.waited(self._arriving.launched_s, started_s, self.ledger)
            self._take(self.worker.read_masks(messages, step + 1, self.density(step)))
        self._arriving = None

    def _sends_all(self) -> bool:
        return self.density(self.worker.step) >= DENSE_FROM

    def _exchanges_masks(self) -> bool:
        """Return whether the coming step needs masks from owners."""
        return not self._sends_all() and self.options.masking.source != "random"

    def _take(self, masks: Any) -> None:
        old = self.worker.masks()
        self.worker.take_masks(masks)
        self.report.taken(old, masks, self.density(self.worker.step))

    def _masks_now(self, scale: Tensor | None) -> None:
        """Pick and exchange the masks of this very step (lag 0): an exposed exchange."""
        step = self.worker.step
        if self.options.masking.source == "random":
            return
        self.worker.pick_from_outgoing(self.density(step), scale)
        self._launch_masks(step)
        self._masks_taken = False
        self.begin()

    def _launch_masks(self, step: int) -> None:
        """Send the picked masks on their way, for `step` (from 0)."""
        density, masking = self.density(step), self.options.masking
        message = self.worker.mask_message(step + 1, density)
        device = local(self.entries[0].param.detach()).device
        if masking.mask_format == "delta":
            lengths = self.exchange.lengths(0 if message is None else message.numel(), device)
        else:
            lengths = self.worker.message_lengths(density)
        self.report.launched(density, sum(lengths))
        self._arriving = self.exchange.launch(message, lengths, device, "masks")

    def _exchange_values(self, scale: Tensor | None) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return x and the mean per run, and the mean of the bad words."""
        pairs = [self.worker.outgoing(run, scale) for run in self.worker.runs]
        sent = [x for x, _ in pairs]
        bad = torch.stack([b for _, b in pairs]).amax(0)
        self.report.values_launched_s = time.perf_counter()
        mean = self.exchange.mean(torch.cat([*sent, bad]))
        self.report.values_waited(self.ledger)
        means = list(mean.split([x.numel() for x in sent] + [1]))
        return sent, means[:-1], means[-1]

    def _verdict(self, means: list[Tensor], words: Tensor) -> bool:
        """Return whether the step goes on, the same on all ranks of the group and the replica."""
        bad = (words != 0).any()
        for p in means:
            bad |= ~all_finite(p)
        count = self.exchange.sum_over_shards(bad.to(torch.float64).view(1))
        if not count.item():
            return True
        if self.options.nonfinite == "skip":
            self.report.skipped += 1
            return False
        names = self.worker.bad_tensors()
        here = f"here in {', '.join(names[:3])}" if names else "on another rank"
        raise NonFiniteError(
            f"NaN or infinity in the gradients of step {self.worker.step + 1} ({here}); all ranks "
            "raise and no state has changed. Lower the learning rate, clip, or use nonfinite='skip'"
        )

    # Clipping

    def _local_scale(self) -> Tensor | None:
        """Return the factor on the local gradients, float64 [1], None without such clipping."""
        how, limit = self.options.clipping, self.options.max_norm
        if how not in ("local", "rms") or limit is None:
            return None
        square = self.exchange.sum_over_shards(self.worker.square_norm())
        if how == "rms":
            square = self.exchange.sum_over_workers(square) / self.table.num_ranks
        self.report.grad_norm = square.sqrt()
        return (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)

    def _reconstructed_clip(self, means: list[Tensor]) -> float:
        """Return the factor on the reconstructed gradient, 1.0 without such clipping."""
        if self.options.clipping != "reconstructed" or self.options.max_norm is None:
            return 1.0
        square = self.exchange.sum_over_shards(self.worker.gradient_square_norm(means))
        norm = math.sqrt(square.item())
        self.report.grad_norm = square.sqrt()
        return min(1.0, self.options.max_norm / (norm + 1e-6))

    # Sharded mode

    def _gather_weights(self) -> None:
        """Fetch every piece that another rank has stepped, in the parameters' dtype."""
        pieces = [(run, p) for run in self.worker.runs for p in run.pieces if not p.dense]
        lengths = [0] * self.table.num_ranks
        for run, piece in pieces:
            lengths[piece.owner] += run.region(piece).nbytes
        mine = [
            run.region(p).reshape(-1).view(torch.uint8)
            for run, p in pieces
            if p.owner == self.exchange.rank
        ]
        device = local(self.entries[0].param.detach()).device
        message = torch.cat(mine) if mine else None
        messages = self.exchange.launch(message, lengths, device, "weights").wait()
        at = [0] * self.table.num_ranks
        for run, piece in pieces:
            region = run.region(piece)
            if piece.owner != self.exchange.rank:
                received = messages[piece.owner]
                assert received is not None
                part = received[at[piece.owner] : at[piece.owner] + region.nbytes]
                region.copy_(part.clone().view(region.dtype).view(region.shape))
            at[piece.owner] += region.nbytes

    # Around steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block without sending any (needed with overlap)."""
        if self.overlap is not None:
            self.overlap.enabled = False
        try:
            yield
        finally:
            if self.overlap is not None:
                self.overlap.enabled = True

    def metrics(self) -> dict[str, float]:
        """Return density, mask form, bytes and waits of the last step, for a line of metrics."""
        sent = sum(run.sent for run in self.worker.runs) / max(1, self.table.numel)
        return {"density": self.density(max(0, self.worker.step - 1)), "sent_fraction": sent} | (
            self.report.metrics()
        )

    def memory(self) -> dict[str, int]:
        """Return this rank's bytes of state: on the device, in host memory, and per kind."""
        return saved.memory(self)

    def state_dict(self) -> dict[str, Any]:
        """Return everything this rank needs to continue bit for bit; waits for masks.

        Beside torch's "state" and "param_groups" stands "scape", this rank's own part (see
        `local_state`). Tools that gather or reshard optimizer state keep the former and drop the
        latter: save `local_state()` with them, per rank, and `load_local_state` after loading.
        """
        return super().state_dict() | {"scape": self.local_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CheckpointError: other parameters, dtypes, shapes, settings or number of workers.
        """
        saved.load_shared(self, state_dict)
        part = state_dict.get("scape")
        if part is None:
            self.missing_part = self.worker.step > 0
        else:
            self.load_local_state([part])

    def local_state(self) -> dict[str, Any]:
        """Return this rank's residuals and masks with what they belong to; waits for masks."""
        if not self.missing_part and self.options.lag == 1:
            self.begin()
        return saved.local_state(self)

    def load_local_state(self, parts: list[dict[str, Any]]) -> None:
        """Continue from `local_state` of this rank, or of all workers if their number changed.

        Raises:
            CheckpointError: see `load_state_dict`.
        """
        saved.load_local_state(self, parts)
        self._masks_taken, self._arriving, self.missing_part = True, None, False

    def close(self) -> None:
        """Wait for what is on its way, remove hooks, end the thread."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self._masks_taken = True
        if self.overlap is not None:
            self.overlap.close()
        self.exchange.close()


def _world() -> dist.ProcessGroup | None:
    return _compat.default_group() if dist.is_initialized() else None


def _shard_group(param_groups: list[dict[str, Any]]) -> dist.ProcessGroup | None:
    """Return the group over which the parameters are sharded, None if they are plain.

    Raises:
        ConfigError: a mesh of several axes, which has no single group.
    """
    for p in (p for group in param_groups for p in group["params"]):
        if isinstance(p, DTensor):
            mesh = p.device_mesh
            if mesh.ndim > 1:
                raise ConfigError(
                    f"parameters lie on a mesh of {mesh.ndim} axes: pass shard_group=, the group "
                    "of all ranks that hold one replica together"
                )
            return mesh.get_group()
    return None


def _like_param(flat: Tensor, p: Tensor) -> Tensor:
    """Return a flat state tensor in the parameter's shape, as a DTensor if the parameter is one."""
    view = flat.view(local(p.detach()).shape)
    if not isinstance(p, DTensor):
        return view
    return DTensor.from_local(
        view, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
