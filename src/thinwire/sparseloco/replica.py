"""One replica's weights as whole tensors, wherever its ranks keep their shards.

Ranks of a replica gather one parameter at a time; the leader (rank 0 of the inner group) keeps the
shared weights and talks to the other replicas, then hands the result back the same way. So replicas
need not share a layout: one may be a single rank, another two of FSDP2.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thinwire.comm import transport
from thinwire.comm.ledger import Ledger, all_gather_sent
from thinwire.eco import local_quantized
from thinwire.eco.export import place_whole, rounded, whole_values
from thinwire.errors import (
    ConfigError,
    ContractError,
    NonFiniteError,
    PeerError,
    ThinwireError,
)

__all__ = ["Inner"]

T = TypeVar("T")
_REASON = "gathered and handed back inside a replica, for the outer sync"
_ERRORS = {e.__name__: e for e in (PeerError, ContractError, ConfigError, NonFiniteError)}


class Inner:
    """The ranks of one replica and the trained parameters they hold together.

    Args:
        params: names and parameters; those without gradient are left out.
        group: the replica's ranks; None takes it from the parameters' mesh.
        ledger: books what the ranks exchange among themselves (link "weights", exempt).

    Attributes:
        params: trained parameters by name, each once.
        is_leader: whether this rank talks to the other replicas.

    Raises:
        ConfigError: a parameter that cannot be gathered, or ranks that cannot be told.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        ledger: Ledger | None,
    ) -> None:
        self.params: dict[str, nn.Parameter] = {}
        for name, p in params:
            if p.requires_grad and not any(p is known for known in self.params.values()):
                _check(name, p)
                self.params[name] = p
        if not self.params:
            raise ConfigError("the model has no parameter that requires a gradient")
        self.group = group or _mesh_group(self.params)
        self.ledger = ledger
        self.is_leader = self.group is None or self.group.rank() == 0

    @property
    def size(self) -> int:
        """Return the ranks of this replica."""
        return 1 if self.group is None else self.group.size()

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """Return a parameter as a whole tensor of its dtype; collective over the inner group."""
        p = self.params[name].detach()
        quantized = local_quantized(p)
        if quantized is not None:
            if isinstance(p, DTensor):
                self._book(all_gather_sent(quantized.storage_nbytes, _pieces(p)))
            return whole_values(p)
        if not isinstance(p, DTensor):
            return p
        self._book(all_gather_sent(p.to_local().nbytes, _pieces(p)))
        return p.full_tensor()

    def start(self, name: str, theta: Tensor) -> Tensor:
        """Return what `place` makes of shared weights: where this replica's round began."""
        p = self.params[name].detach()
        return theta.to(p.dtype) if local_quantized(p) is None else rounded(p, theta)

    @torch.no_grad()
    def place(self, theta: Mapping[str, Tensor] | None) -> None:
        """Write the leader's weights into every rank's parameters; collective over the inner group.

        Args:
            theta: fp32 by name on the leader, None elsewhere.
        """
        for name, param in self.params.items():
            p = param.detach()
            here = p.to_local().device if isinstance(p, DTensor) else p.device
            if theta is not None:
                full = theta[name].to(here, p.dtype).contiguous()
            else:
                full = torch.empty(p.shape, dtype=p.dtype, device=here)
            if self.group is not None and full.numel():
                transport.broadcast(full, 0, self.group)
                self._book(full.nbytes * (self.size - 1) if self.is_leader else 0)
            if local_quantized(p) is not None:
                place_whole(p, full)
            elif isinstance(p, DTensor):
                whole = DTensor.from_local(
                    full, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False
                )
                p.to_local().copy_(whole.redistribute(placements=p.placements).to_local())
            else:
                p.copy_(full)

    def lead(self, action: Callable[[], T]) -> T:
        """Run `action` on the leader and give its result to all; its errors are raised by all."""
        if self.group is None:
            return action()
        failure: ThinwireError | None = None
        box: list[Any] = [None, "", ""]
        if self.is_leader:
            try:
                box[0] = action()
            except ThinwireError as error:
                failure, box = error, [None, type(error).__name__, str(error)]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        if failure is not None:
            raise failure
        result, kind, message = box
        if kind:
            raise _ERRORS.get(kind, ThinwireError)(f"the replica's leader: {message}")
        return result

    def _book(self, nbytes: int) -> None:
        if self.ledger is not None and nbytes:
            self.ledger.book(
                "weights",
                dense_bytes=nbytes,
                wire_bytes=nbytes,
                exempt_bytes=nbytes,
                reason=_REASON,
            )


def _pieces(p: DTensor) -> int:
    """Return the number of pieces that a parameter lies in."""
    axes = enumerate(p.placements)
    return math.prod(p.device_mesh.size(axis) for axis, place in axes if not place.is_replicate())


def _check(name: str, p: nn.Parameter) -> None:
    data = p.detach()
    quantized = local_quantized(data)
    if quantized is not None:
        if quantized.master is not None:
            raise ConfigError(
                f"{name!r} keeps a master copy, which the outer sync does not follow: store it "
                "with master=False"
            )
        return
    local = data.to_local() if isinstance(data, DTensor) else data
    if type(local) not in (Tensor, nn.Parameter) or not local.is_floating_point():
        raise ConfigError(
            f"{name!r} is stored as {type(local).__name__} of {local.dtype}: the outer sync takes "
            "plain floating parameters, and those of thinwire.eco"
        )


def _mesh_group(params: Mapping[str, nn.Parameter]) -> dist.ProcessGroup | None:
    meshes = [p.device_mesh for p in params.values() if isinstance(p, DTensor)]
    if not meshes:
        return None
    if any(mesh != meshes[0] for mesh in meshes) or meshes[0].ndim > 1:
        raise ConfigError(
            "parameters lie on several mesh axes: pass inner_group, the group of all ranks of this "
            "replica"
        )
    return meshes[0].get_group()
