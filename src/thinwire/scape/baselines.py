"""Published compressors to compare with: DGC, a DeMo-like optimizer, PowerSGD.

Each is a worker whose step is a generator: it yields a message and is sent the messages of all
workers (rank order), or their mean. `SyncOptimizer` runs one worker over a process group, the
simulator runs N in lock-step, with the same code and bytes.

Legend: `N` workers, `K` elements kept, `C` chunks, `S` elements of a chunk.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire import _compat, comm
from thinwire.comm import Ledger, transport
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError
from thinwire.kernels.adams import largest
from thinwire.kernels.finite import all_finite
from thinwire.scape.layout import Entry, list_entries, local
from thinwire.scape.reduce import ValueWire

__all__ = ["Demo", "Dgc", "PowerSgd", "SyncOptimizer", "SyncSimulator"]

_WIRE = ValueWire(torch.float32)
States = Sequence[dict[str, Tensor]]
Steps = Generator[tuple[str, Tensor], Any, None]


class SyncRule(Protocol):
    """One worker's step.

    `state(p)` returns what a parameter needs; `update` yields ("gather", x) and is sent the list
    of all workers' x, or ("mean", x) and is sent their mean.
    """

    def state(self, p: Tensor) -> dict[str, Tensor]:
        """Return fresh state of a parameter."""

    def update(
        self,
        entries: Sequence[Entry],
        states: States,
        step: int,
        num_ranks: int,
    ) -> Steps:
        """Do one step (counted from 1)."""


def _grad(entry: Entry) -> Tensor:
    p = entry.param
    return torch.zeros_like(p) if p.grad is None else p.grad.detach().float()


def _decay(entry: Entry) -> float:
    group = entry.group
    return 1 - group["lr"] * group["weight_decay"] if entry.param.ndim > 1 else 1.0


def _is_small(p: Tensor) -> bool:
    return p.ndim < 2 or p.numel() < 4096


@dataclass(frozen=True)
class Dgc:
    """Deep Gradient Compression: momentum SGD whose accumulated velocity is sent sparsely.

    u = mom*u + g; w = w + u; each worker sends its own top-k of |w| and zeroes u and w there.

    Attributes:
        density: fraction sent at the end.
        momentum: mom.
        ramp: densities of the first epochs, each for `ramp_steps`.
        ramp_steps: steps per density.
        max_norm: bound on the mean gradient's norm, N^-1/2 of it per worker; 0 for none.

    Reference: Lin et al., arXiv 1712.01887.
    """

    density: float = 0.001
    momentum: float = 0.9
    ramp: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    ramp_steps: int = 0
    max_norm: float = 0.0

    def state(self, p: Tensor) -> dict[str, Tensor]:
        """See `SyncRule`."""
        return {"velocity": torch.zeros_like(p), "residual": torch.zeros_like(p)}

    def density_at(self, step: int) -> float:
        """Return the density of a step (from 1)."""
        stage = (step - 1) // self.ramp_steps if self.ramp_steps else len(self.ramp)
        return max(self.density, self.ramp[stage]) if stage < len(self.ramp) else self.density

    def update(
        self,
        entries: Sequence[Entry],
        states: States,
        step: int,
        num_ranks: int,
    ) -> Steps:
        """See `SyncRule`."""
        grads = [_grad(e) for e in entries]
        if self.max_norm:
            norm = torch.stack([g.norm() for g in grads]).norm()
            factor = (self.max_norm * num_ranks**-0.5 / (norm + 1e-6)).clamp(max=1.0)
            grads = [g * factor for g in grads]
        indices, values, dense = [], [], []
        for entry, state, g in zip(entries, states, grads, strict=True):
            u, w = state["velocity"], state["residual"]
            if _is_small(entry.param):
                dense.append(g.view(-1))
                continue
            u.mul_(self.momentum).add_(g)
            w.add_(u)
            k = max(1, round(self.density_at(step) * w.numel()))
            index = largest(w.view(-1).abs(), k)
            indices.append(index)
            values.append(w.view(-1)[index].clone())
            u.view(-1)[index] = 0
            w.view(-1)[index] = 0
        all_indices = yield "gather", torch.cat(indices).to(torch.int32)
        all_values = yield "gather", torch.cat(values)
        mean_dense = (yield "mean", torch.cat(dense)) if dense else torch.empty(0)
        self._apply(entries, states, indices, all_indices, all_values, mean_dense)

    def _apply(
        self,
        entries: Sequence[Entry],
        states: States,
        indices: Sequence[Tensor],
        all_indices: Sequence[Tensor],
        all_values: Sequence[Tensor],
        mean_dense: Tensor,
    ) -> None:
        at, small, i = 0, 0, 0
        for entry, state in zip(entries, states, strict=True):
            p, lr = entry.param.detach(), entry.group["lr"]
            p.mul_(_decay(entry))
            if _is_small(p):
                u = state["velocity"]
                u.mul_(self.momentum).add_(mean_dense[small : small + p.numel()].view_as(p))
                small += p.numel()
                p.sub_(u * lr)
                continue
            k = indices[i].numel()
            total = torch.zeros(p.numel(), device=p.device)
            for index, value in zip(all_indices, all_values, strict=True):
                total[index[at : at + k].long()] += value[at : at + k]
            at, i = at + k, i + 1
            p.view(-1).sub_(total * (lr / len(all_values)))


@dataclass(frozen=True)
class Demo:
    """DeMo-like: the fast components of each worker's momentum, signed steps.

    m = decay*m + g; per chunk of S elements the k largest DCT components leave m and are gathered;
    the weights step by lr * sign of their sum.

    Attributes:
        decay: of the momentum.
        chunk: S.
        k: components sent per chunk.

    Reference: Peng et al., "DeMo", arXiv 2411.19870.
    """

    decay: float = 0.999
    chunk: int = 64
    k: int = 4

    def state(self, p: Tensor) -> dict[str, Tensor]:
        """See `SyncRule`."""
        return {"momentum": torch.zeros_like(p)}

    def update(
        self,
        entries: Sequence[Entry],
        states: States,
        step: int,
        num_ranks: int,
    ) -> Steps:
        """See `SyncRule`."""
        momenta = [
            s["momentum"].mul_(self.decay).add_(_grad(e))
            for e, s in zip(entries, states, strict=True)
        ]
        flat = torch.cat([m.view(-1) for m in momenta])
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.chunk))
        basis_SS = _dct(self.chunk, padded.device)
        x_CS = padded.view(-1, self.chunk) @ basis_SS.T
        index_CK = x_CS.abs().topk(self.k, dim=1).indices
        value_CK = x_CS.gather(1, index_CK)
        kept = torch.zeros_like(x_CS).scatter_(1, index_CK, value_CK) @ basis_SS
        flat -= kept.view(-1)[: flat.numel()]
        indices = yield "gather", index_CK.to(torch.uint8)
        values = yield "gather", value_CK
        total = torch.zeros_like(x_CS)
        for index, value in zip(indices, values, strict=True):
            total.scatter_add_(1, index.long(), value)
        direction = (total @ basis_SS).sign_().view(-1)[: flat.numel()]
        at = 0
        for entry, m in zip(entries, momenta, strict=True):
            part = slice(at, at + m.numel())
            at += m.numel()
            m.view(-1).copy_(flat[part])
            p = entry.param.detach()
            p.mul_(_decay(entry)).view(-1).sub_(direction[part] * entry.group["lr"])


def _dct(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II, [S, S]."""
    n = torch.arange(size, device=device, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (n[None] + 0.5) * n[:, None]) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis.float()


@dataclass(frozen=True)
class PowerSgd:
    """PowerSGD with error feedback and warm start, AdamW on the reconstruction.

    M = g + e as a matrix; P = mean(M Q), orthonormal; Q = mean(M^T P); g^ = P Q^T; e = M - g^.

    Attributes:
        rank: columns of P and Q.
        betas: of AdamW.
        eps: of AdamW.

    Reference: Vogels et al., arXiv 1905.13727.
    """

    rank: int = 4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def state(self, p: Tensor) -> dict[str, Tensor]:
        """See `SyncRule`."""
        state = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        if not _is_small(p):
            columns = p.numel() // p.shape[0]
            generator = torch.Generator().manual_seed(p.shape[0] * 65_537 + columns)
            q = torch.randn(columns, self.rank, generator=generator)
            state |= {"residual": torch.zeros_like(p), "q": q.to(p.device)}
        return state

    def update(
        self,
        entries: Sequence[Entry],
        states: States,
        step: int,
        num_ranks: int,
    ) -> Steps:
        """See `SyncRule`."""
        rows = list(zip(entries, states, strict=True))
        matrices = [(_grad(e) + s["residual"]).flatten(1) for e, s in rows if "q" in s]
        large = [s for _, s in rows if "q" in s]
        left = [m @ s["q"] for m, s in zip(matrices, large, strict=True)]
        small = [_grad(e).view(-1) for e, s in rows if "q" not in s]
        mean = yield "mean", torch.cat([x.reshape(-1) for x in (*left, *small)])
        parts = mean.split([x.numel() for x in (*left, *small)])
        ps = [torch.linalg.qr(x.view_as(like)).Q for x, like in zip(parts, left, strict=False)]
        right = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        mean = yield "mean", torch.cat([x.reshape(-1) for x in right])
        qs = [
            x.view_as(r) for x, r in zip(mean.split([x.numel() for x in right]), right, strict=True)
        ]
        big, little = iter(zip(matrices, ps, qs, strict=True)), iter(parts[len(left) :])
        for entry, state in rows:
            if "q" in state:
                m, p, q = next(big)
                grad = (p @ q.T).view_as(entry.param)
                state["residual"].copy_(m.view_as(entry.param) - grad)
                state["q"].copy_(q)
            else:
                grad = next(little).view_as(entry.param)
            self._adamw(entry, state, grad, step)

    def _adamw(self, entry: Entry, state: dict[str, Tensor], grad: Tensor, step: int) -> None:
        (b1, b2), lr, w = self.betas, entry.group["lr"], entry.param.detach()
        m = state["exp_avg"].mul_(b1).add_(grad * (1 - b1))
        v = state["exp_avg_sq"].mul_(b2).add_(grad.square() * (1 - b2))
        denominator = (v / (1 - b2**step)).sqrt_().add_(self.eps)
        w.mul_(_decay(entry)).sub_(m * (lr / (1 - b1**step)) / denominator)


class _Books:
    """Book what the messages of one step cost beside the dense all-reduce."""

    def __init__(self, ledger: Ledger | None, entries: Sequence[Entry], num_ranks: int) -> None:
        self.ledger, self.num_ranks = ledger, num_ranks
        self.dense_bytes = all_reduce_sent(4 * sum(e.param.numel() for e in entries), num_ranks)
        if ledger is not None:
            ledger.expect("gradients", num_ranks=num_ranks)

    def book(self, messages: Sequence[tuple[str, int]]) -> None:
        if self.ledger is None or self.num_ranks == 1:
            return
        sent = sum(
            all_gather_sent(nbytes, self.num_ranks)
            if kind == "gather"
            else _WIRE.sent_bytes(nbytes // 4, self.num_ranks)
            for kind, nbytes in messages
        )
        self.ledger.book(
            "gradients", dense_bytes=self.dense_bytes, wire_bytes=sent, calls=len(messages)
        )


class SyncOptimizer(Optimizer):
    """One worker of a baseline over a process group.

    Args:
        params: parameters or groups, plain float32 tensors.
        rule: `Dgc`, `Demo` or `PowerSgd`.
        lr: learning rate.
        weight_decay: decoupled decay, on parameters with two or more dimensions.
        group: the workers; None is the world.
        ledger: books every byte.

    Raises:
        ConfigError: sharded or 16-bit parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: SyncRule,
        lr: float,
        weight_decay: float = 0.0,
        *,
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.rule, self.group = rule, group or _compat.default_group()
        self.entries = list_entries(self.param_groups)
        for entry in self.entries:
            p = entry.param
            if local(p.detach()).data_ptr() != p.data_ptr() or p.dtype != torch.float32:
                raise ConfigError(f"baselines take plain float32 parameters, not {entry.name!r}")
            self.state[p] = rule.state(p.detach())
        self.num_steps = 0
        self._books = _Books(ledger, self.entries, self.group.size())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; collective.

        Raises:
            NonFiniteError: on all ranks, if the weights are no longer finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        states = [self.state[e.param] for e in self.entries]
        steps = self.rule.update(self.entries, states, self.num_steps, self.group.size())
        reply, sent = None, []
        while True:
            try:
                kind, x = steps.send(reply)
            except StopIteration:
                break
            sent.append((kind, x.nbytes))
            reply = self._exchange(kind, x)
        self._books.book(sent)
        return loss

    def _exchange(self, kind: str, x: Tensor) -> Any:
        if kind == "mean":
            total = comm.all_reduce(x, _WIRE.codec, group=self.group, nonfinite="propagate")
            _refuse_nonfinite([total])
            return total / self.group.size()
        message = x.contiguous().view(-1).view(torch.uint8)
        received, _ = transport.all_gather(message, self.group)
        parts = [row.clone().view(x.dtype).view(x.shape) for row in received]
        _refuse_nonfinite(parts)
        return parts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from torch's `state_dict`."""
        super().load_state_dict(state_dict)
        # torch makes new group dicts: entries must follow the learning rates in these.
        self.entries = list_entries(self.param_groups)

    def metrics(self) -> dict[str, float]:
        """Return nothing beyond the ledger."""
        return {}

    def local_state(self) -> dict[str, Any]:
        """Return this worker's state and step."""
        states = {e.name: dict(self.state[e.param]) for e in self.entries}
        return {"step": self.num_steps, "num_ranks": self.group.size(), "state": states}

    def load_local_state(self, parts: list[dict[str, Any]]) -> None:
        """Continue from `local_state` of this rank.

        Raises:
            CheckpointError: another number of workers.
        """
        part = parts[0]
        if part["num_ranks"] != self.group.size():
            raise CheckpointError(
                f"a baseline saved by {part['num_ranks']} workers resumes on that number only, "
                f"not on {self.group.size()}"
            )
        self.num_steps = part["step"]
        for entry in self.entries:
            for name, x in part["state"][entry.name].items():
                self.state[entry.param][name].copy_(x)


class SyncSimulator:
    """N workers of a baseline in one process; use as `simulate.Simulator`."""

    def __init__(
        self,
        params: Iterable[Any],
        num_workers: int,
        rule: SyncRule,
        *,
        lr: float,
        weight_decay: float = 0.0,
        ledger: Ledger | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay}
        self.param_groups = Optimizer(params, defaults).param_groups
        self.rule, self.num_steps = rule, 0
        entries = list_entries(self.param_groups)
        copies = [
            [Entry(e.name, torch.nn.Parameter(e.param.detach().clone()), e.group) for e in entries]
            for _ in range(num_workers - 1)
        ]
        self.workers = [entries, *copies]
        self.states = [[rule.state(e.param.detach()) for e in es] for es in self.workers]
        self._books = _Books(ledger, entries, num_workers)
        self._grads: list[list[Tensor | None]] = [[] for _ in self.workers]

    def collect(self, worker: int) -> None:
        """Hand the gradients that the model now holds to a worker."""
        self._grads[worker] = [e.param.grad for e in self.workers[0]]
        for entry in self.workers[0]:
            entry.param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Do one step of all workers in lock-step."""
        self.num_steps += 1
        for entries, grads in zip(self.workers, self._grads, strict=True):
            for entry, g in zip(entries, grads, strict=True):
                entry.param.grad = g
        n = len(self.workers)
        running = [
            self.rule.update(entries, states, self.num_steps, n)
            for entries, states in zip(self.workers, self.states, strict=True)
        ]
        asked: list[tuple[str, Tensor]] = [steps.send(None) for steps in running]
        sent = []
        while asked:
            kind, parts = asked[0][0], [x for _, x in asked]
            sent.append((kind, parts[0].nbytes))
            _refuse_nonfinite(parts)
            reply = _WIRE.mean(parts) if kind == "mean" else parts
            asked = []
            for steps in running:
                try:
                    asked.append(steps.send(reply))
                except StopIteration:
                    continue
        self._books.book(sent)
        for entry in self.workers[0]:
            entry.param.grad = None


def _refuse_nonfinite(parts: Sequence[Tensor]) -> None:
    if parts[0].is_floating_point() and not all(map(all_finite, parts)):
        raise NonFiniteError("NaN or infinity in a baseline's message; all ranks raise")
