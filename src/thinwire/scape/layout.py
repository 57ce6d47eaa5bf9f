"""Where state lies: runs of whole parameters in flat buffers, so that a step is few large calls.

A run holds consecutive parameters of one parameter group, device and dtype, up to a size. It is
the unit of computing, of overlap with backward, and of moving to and from host memory.

Legend: `N` elements of a run, `E` of them in the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.errors import ConfigError
from thinwire.scape.table import Piece, Table

__all__ = ["Entry", "Run", "list_entries", "local", "make_runs", "state_dtype"]


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, a plain tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def state_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state: float64 for float64, else float32."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of the optimizer.

    Attributes:
        name: full name, or "param.I" if the optimizer was given none.
        param: the parameter.
        group: its parameter group (a live dict: learning rates change).
        copies: ranks of one replica that hold the very elements that this rank holds.
    """

    name: str
    param: nn.Parameter
    group: dict[str, Any]
    copies: int = 1


def list_entries(param_groups: Sequence[dict[str, Any]], shard_ranks: int = 1) -> list[Entry]:
    """Return all parameters in wire order.

    Args:
        param_groups: of an optimizer.
        shard_ranks: ranks that hold one replica together; each holds plain parameters whole.

    Raises:
        ConfigError: a parameter that is not a dense floating tensor.
    """
    entries: list[Entry] = []
    for group in param_groups:
        for i, p in enumerate(group["params"]):
            names = group.get("param_names")
            name = names[i] if names else f"param.{len(entries)}"
            if not p.is_floating_point() or p.layout != torch.strided:
                raise ConfigError(f"parameter {name!r} is {p.dtype} {p.layout}: floats only")
            entries.append(Entry(name, p, group, _copies(p, shard_ranks)))
    return entries


def _copies(p: Tensor, shard_ranks: int) -> int:
    if not isinstance(p, DTensor):
        return shard_ranks
    copies = max(1, shard_ranks // p.device_mesh.size())
    for dim, placement in enumerate(p.placements):
        if placement.is_replicate():
            copies *= p.device_mesh.size(dim)
    return copies


@dataclass(eq=False)
class Run:
    """Consecutive parameters and their flat state.

    Attributes:
        entries: the parameters.
        pieces: their pieces, in order; flat positions start at 0 with the first.
        state: flat tensors [N] by name; "residual" is this worker's own.
        index: ascending flat positions of this step's mask, int64 [E]; None for all.
        masters: weights per piece in the state's dtype where the parameters cannot hold it.
    """

    entries: list[Entry]
    pieces: list[Piece]
    state: dict[str, Tensor] = field(default_factory=dict)
    index: Tensor | None = None
    masters: dict[Piece, Tensor] | None = None
    numel: int = 0

    @property
    def group(self) -> dict[str, Any]:
        """Return the parameter group."""
        return self.entries[0].group

    @property
    def sent(self) -> int:
        """Return E."""
        return self.numel if self.index is None else self.index.numel()

    def slices(self, pieces: Sequence[Piece]) -> list[slice]:
        """Return where pieces of this run lie in its flat tensors."""
        starts = self.starts()
        return [slice(starts[p], starts[p] + p.numel) for p in pieces]

    def starts(self) -> dict[Piece, int]:
        """Return the flat start of each piece."""
        starts, at = {}, 0
        for piece in self.pieces:
            starts[piece] = at
            at += piece.numel
        return starts

    def spans(self) -> list[tuple[Entry, slice]]:
        """Return where each parameter lies."""
        spans, at = [], 0
        for entry in self.entries:
            numel = local(entry.param.detach()).numel()
            spans.append((entry, slice(at, at + numel)))
            at += numel
        return spans

    def flat_grad(self) -> Tensor:
        """Return the gradients [N] in the state's dtype, zeros where there is none."""
        return torch.cat([_grad(e).reshape(-1).to(state_dtype(e.param)) for e in self.entries])

    def piece_grads(self) -> list[Tensor]:
        """Return the gradient [N] of each piece in its own dtype, zeros where there is none."""
        grads = {e.name: _grad(e).reshape(-1) for e in self.entries}
        first = self.pieces[0].param
        return [
            grads[self.entries[p.param - first].name][p.start : p.start + p.numel]
            for p in self.pieces
        ]

    def weights(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Return a flat view in the state's dtype per piece, to be updated in place."""
        if self.masters is not None:
            return [self.masters[p] for p in pieces]
        return [self.region(p).view(-1) for p in pieces]

    def publish(self, pieces: Sequence[Piece]) -> None:
        """Write the master weights of pieces into the parameters."""
        if self.masters is not None:
            for piece in pieces:
                region = self.region(piece)
                region.copy_(self.masters[piece].view(region.shape))

    def region(self, piece: Piece) -> Tensor:
        """Return the part of its parameter that a piece is."""
        p = self.param(piece)
        if piece.numel == p.numel():
            return p
        row_numel = p.numel() // p.shape[0]
        return p.narrow(0, piece.start // row_numel, piece.numel // row_numel)

    def param(self, piece: Piece) -> Tensor:
        """Return this rank's part of the parameter that a piece belongs to."""
        return local(self.entries[piece.param - self.pieces[0].param].param.detach())

    def make_masters(self, pieces: Sequence[Piece]) -> None:
        """Hold weights in the state's dtype for pieces whose parameters cannot."""
        first = local(self.entries[0].param.detach())
        if _needs_master(first):
            dtype = state_dtype(first)
            self.masters = {p: self.region(p).reshape(-1).to(dtype, copy=True) for p in pieces}


def _grad(entry: Entry) -> Tensor:
    grad = entry.param.grad
    if grad is None:
        return torch.zeros_like(local(entry.param.detach()))
    if isinstance(grad, DTensor) and isinstance(entry.param, DTensor):
        if grad.placements != entry.param.placements:
            grad = grad.redistribute(placements=entry.param.placements)
        return grad.to_local().detach()
    return local(grad.detach())


def make_runs(
    entries: Sequence[Entry], table: Table, *, max_bytes: int, last_first: bool = False
) -> list[Run]:
    """Return the runs in wire order.

    Args:
        entries: parameters in wire order.
        table: their pieces.
        max_bytes: largest run in bytes of the state's dtype (one parameter may exceed it).
        last_first: fill runs from the last parameter on, as backward finishes them.
    """
    by_param: dict[int, list[Piece]] = {}
    for piece in table.pieces:
        by_param.setdefault(piece.param, []).append(piece)
    bins: list[list[int]] = []
    size, kind = 0, None
    for i in reversed(range(len(entries))) if last_first else range(len(entries)):
        p = local(entries[i].param.detach())
        entry = entries[i]
        this = (id(entry.group), entry.copies, p.device, state_dtype(p), _needs_master(p))
        nbytes = p.numel() * state_dtype(p).itemsize
        if not bins or this != kind or size + nbytes > max_bytes:
            bins.append([])
            size, kind = 0, this
        bins[-1].append(i)
        size += nbytes
    if last_first:
        bins = [sorted(b) for b in reversed(bins)]
    return [_make_run(b, entries, by_param) for b in bins]


def _make_run(bin_: list[int], entries: Sequence[Entry], by_param: dict[int, list[Piece]]) -> Run:
    run = Run([entries[i] for i in bin_], [piece for i in bin_ for piece in by_param[i]])
    run.numel = sum(p.numel for p in run.pieces)
    return run


def _needs_master(p: Tensor) -> bool:
    return p.dtype != state_dtype(p) or not p.is_contiguous()
