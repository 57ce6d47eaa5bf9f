"""Top-k with error feedback as a DDP communication hook, for those who keep their own optimizer.

The lesser choice: each worker sends the top k of its own gradient plus residual, so messages grow
with N and the second moment of Adam sees a gradient that is zero off the mask; `Scape` sends one
summed message on a shared mask. A step of the hook, per bucket:
1. Add each parameter's residual to its gradient; keep the k largest, the rest is the new residual.
2. Gather (12-bit positions, fp32 values) of all workers; parameters with fewer than two dimensions
   or few elements are gathered whole.
3. The bucket becomes the mean over workers, in rank order.

Residuals are keyed by parameter, because DDP rebuilds its buckets after the first step; one ordered
thread with a group of its own runs the collectives.

Legend: `K` elements kept, `N` elements of a parameter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire import _compat
from thinwire.codecs.bitmask import Bitmask
from thinwire.comm import Ledger, transport
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError
from thinwire.kernels.adams import largest
from thinwire.kernels.finite import all_finite
from thinwire.scape.exchange import OrderedThread, twin_group

__all__ = ["TopkHook"]


@dataclass(frozen=True, slots=True)
class _Part:
    numel: int
    k: int  # 0: sent whole

    @property
    def nbytes(self) -> int:
        if not self.k:
            return 4 * self.numel
        return 4 * self.k + Bitmask(k=self.k, form="index12").wire_nbytes(self.numel)


class TopkHook:
    """State and hook of one rank.

    Args:
        named_params: `model.named_parameters()` of the module under DDP.
        density: fraction of a parameter's gradient that is sent.
        dense_below: parameters with fewer elements are sent whole.
        group: DDP's process group; None is the world.
        ledger: books every byte.

    Raises:
        ConfigError: density outside (0, 1].

    Example:
        >>> hook = TopkHook(model.named_parameters(), density=0.01)
        >>> ddp.register_comm_hook(hook, TopkHook.hook)
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        density: float = 0.01,
        *,
        dense_below: int = 4096,
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if not 0 < density <= 1:
            raise ConfigError(f"density must lie in (0, 1], got {density}")
        self.density, self.ledger = density, ledger
        self.group = twin_group(group or _compat.default_group())
        self.thread = OrderedThread()
        self._names = {p: name for name, p in named_params}
        self._parts = {
            p: _Part(p.numel(), 0 if small else max(1, round(density * p.numel())))
            for p in self._names
            for small in [p.ndim < 2 or p.numel() < dense_below]
        }
        self.residuals = {
            p: torch.zeros(p.numel(), device=p.device) for p, part in self._parts.items() if part.k
        }
        if ledger is not None:
            ledger.expect("gradients", num_ranks=self.group.size())
            for p, part in self._parts.items():
                if not part.k:
                    reason = f"fewer than 2 dimensions or than {dense_below} elements"
                    ledger.declare_exempt("gradients", self._names[p], reason, part.nbytes)

    @staticmethod
    def hook(state: "TopkHook", bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Return a future of the bucket's mean; what `register_comm_hook` takes."""
        params, buffer = bucket.parameters(), bucket.buffer()
        rows = list(zip(params, [g.reshape(-1).float() for g in bucket.gradients()], strict=True))
        message = torch.cat([state._encode(p, g) for p, g in rows])
        return state.thread.submit(lambda: state._finish(params, message, buffer), buffer.device)

    def _encode(self, p: nn.Parameter, g: Tensor) -> Tensor:
        part = self._parts[p]
        if not part.k:
            return g.contiguous().view(torch.uint8)
        residual = self.residuals[p]
        total = g + residual
        if not all_finite(total):
            total = torch.full_like(g, torch.nan)  # seen by all; the residual stays as it was
            index = torch.arange(part.k, device=g.device)
        else:
            index = largest(total.abs(), part.k)
            residual.copy_(total)
            residual[index] = 0
        how = Bitmask(k=part.k, form="index12")
        values = total[index].view(torch.uint8)
        return torch.cat((values, how.encode_index(index, part.numel)))

    def _finish(self, params: list[nn.Parameter], message: Tensor, buffer: Tensor) -> Tensor:
        num_ranks = self.group.size()
        received, _ = transport.all_gather(message, self.group)
        total = torch.zeros(buffer.numel(), device=buffer.device)
        for row in received:
            self._add(params, row, total)
        if self.ledger is not None:
            exempt = sum(self._parts[p].nbytes for p in params if not self._parts[p].k)
            self.ledger.book(
                "gradients",
                dense_bytes=all_reduce_sent(4 * buffer.numel(), num_ranks),
                wire_bytes=all_gather_sent(message.numel(), num_ranks),
                exempt_bytes=all_gather_sent(exempt, num_ranks),
                reason="tensors that are always dense" if exempt else "",
            )
        if not all_finite(total):
            raise NonFiniteError("NaN or infinity in a rank's gradients; all ranks raise")
        return buffer.copy_(total / num_ranks)

    def _add(self, params: list[nn.Parameter], row: Tensor, total: Tensor) -> None:
        at = start = 0
        for p in params:
            part = self._parts[p]
            wire, target = row[at : at + part.nbytes], total[start : start + part.numel]
            if part.k:
                values = wire[: 4 * part.k].clone().view(torch.float32)
                how = Bitmask(k=part.k, form="index12")
                target[how.decode_index(wire[4 * part.k :].clone(), part.numel)] += values
            else:
                target += wire.clone().view(torch.float32)
            at, start = at + part.nbytes, start + part.numel

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, and what they belong to."""
        residuals = {self._names[p]: r for p, r in self.residuals.items()}
        return {"density": self.density, "num_ranks": self.group.size(), "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of this rank.

        Raises:
            CheckpointError: another density, number of ranks or set of parameters.
        """
        own = self.state_dict()
        for key in ("density", "num_ranks"):
            if state[key] != own[key]:
                raise CheckpointError(f"the hook was saved with {key} {state[key]}, not {own[key]}")
        if state["residuals"].keys() != own["residuals"].keys():
            raise CheckpointError("the hook was saved for other parameters")
        for name, residual in state["residuals"].items():
            own["residuals"][name].copy_(residual)

    def close(self) -> None:
        """End the thread."""
        self.thread.close()
