"""Where a tensor-parallel block talks: pairs of collectives that are each other's gradient.

All functions take and return local floating tensors. A codec is the identity to autograd; wire
buffers live inside the collectives, never between autograd nodes.

| region           | forward        | backward       | place                                       |
|------------------|----------------|----------------|---------------------------------------------|
| `copy_in`        | identity       | all-reduce     | input of column-parallel layers             |
| `reduce_out`     | all-reduce     | identity       | output of row-parallel layers               |
| `gather`         | all-gather     | reduce-scatter | the same input, sharded over the sequence   |
| `scatter_reduce` | reduce-scatter | all-gather     | the same output, sharded over the sequence  |
| `gather_out`     | all-gather     | own piece      | sharded output wanted whole on every rank   |
| `split_in`       | own piece      | all-gather     | whole input wanted sharded                  |

A dimension of size n is cut as `torch.chunk` cuts it: pieces of ceil(n/R), the last ones shorter
or empty. Pieces travel padded to the largest.

Legend: `R` ranks.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.taco.link import Channel, Wire

__all__ = [
    "copy_in",
    "gather",
    "gather_out",
    "own_piece",
    "piece_sizes",
    "reduce_out",
    "scatter_reduce",
    "split_in",
]


def copy_in(x: Tensor, wire: Wire) -> Tensor:
    """Return x; its gradient, a partial sum per rank, is summed over the group."""
    return _CopyIn.apply(x, wire)


def reduce_out(x: Tensor, wire: Wire) -> Tensor:
    """Return the sum of x over the group; the gradient, equal on all ranks, passes."""
    return _ReduceOut.apply(x, wire)


def gather(x: Tensor, wire: Wire, dim: int, size: int | None = None) -> Tensor:
    """Return all ranks' pieces joined along `dim`; partial gradients are summed and cut.

    Args:
        x: this rank's piece.
        wire: the bound link.
        dim: dimension along which the pieces lie; may be negative.
        size: length of the whole; None: R equal pieces.
    """
    return _Gather.apply(x, wire, _positive(dim, x), _whole(x, wire, dim, size))


def scatter_reduce(x: Tensor, wire: Wire, dim: int) -> Tensor:
    """Return this rank's piece along `dim` of the sum over the group; gradients are gathered."""
    return _ScatterReduce.apply(x, wire, _positive(dim, x))


def gather_out(x: Tensor, wire: Wire, dim: int, size: int | None = None) -> Tensor:
    """Return all ranks' pieces joined along `dim`; of the (equal) gradients each keeps its piece.

    Args: as for `gather`.
    """
    return _GatherOut.apply(x, wire, _positive(dim, x), _whole(x, wire, dim, size))


def split_in(x: Tensor, wire: Wire, dim: int) -> Tensor:
    """Return this rank's piece of x along `dim`; the pieces' gradients are gathered."""
    return _SplitIn.apply(x, wire, _positive(dim, x))


def piece_sizes(size: int, num_ranks: int) -> list[int]:
    """Return the lengths of the pieces of a dimension, in rank order."""
    chunk = -(-size // num_ranks)
    return [min(chunk, max(size - rank * chunk, 0)) for rank in range(num_ranks)]


def own_piece(x: Tensor, wire: Wire, dim: int) -> Tensor:
    """Return this rank's piece of x along `dim`, a view."""
    chunk = -(-x.shape[dim] // wire.num_ranks)
    start = min(wire.rank * chunk, x.shape[dim])
    return x.narrow(dim, start, min(chunk, x.shape[dim] - start))


def _positive(dim: int, x: Tensor) -> int:
    return dim if dim >= 0 else dim + x.dim()


def _whole(x: Tensor, wire: Wire, dim: int, size: int | None) -> int:
    return x.shape[dim] * wire.num_ranks if size is None else size


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    """Return x with zeros appended along `dim` up to `length`."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


def _all_gather(x: Tensor, wire: Wire, channel: Channel, dim: int, size: int) -> Tensor:
    chunk = -(-size // wire.num_ranks)
    pieces = wire.all_gather(_pad(x, dim, chunk).contiguous(), channel)
    return pieces.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size).contiguous()


def _reduce_scatter(x: Tensor, wire: Wire, channel: Channel, dim: int) -> Tensor:
    size = x.shape[dim]
    chunk = -(-size // wire.num_ranks)
    pieces = _pad(x, dim, chunk * wire.num_ranks).unflatten(dim, (wire.num_ranks, chunk))
    own = wire.reduce_scatter(pieces.movedim(dim, 0).contiguous(), channel).squeeze(0)
    return own.narrow(dim, 0, piece_sizes(size, wire.num_ranks)[wire.rank]).contiguous()


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.all_reduce(grad.contiguous(), ctx.wire.backward), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        return wire.all_reduce(x.contiguous(), wire.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, dim: int, size: int) -> Tensor:
        ctx.wire, ctx.dim = wire, dim
        return _all_gather(x, wire, wire.forward, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(grad, ctx.wire, ctx.wire.backward, ctx.dim), None, None, None


class _ScatterReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, dim: int) -> Tensor:
        ctx.wire, ctx.dim, ctx.size = wire, dim, x.shape[dim]
        return _reduce_scatter(x, wire, wire.forward, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.wire, ctx.wire.backward, ctx.dim, ctx.size), None, None


class _GatherOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, dim: int, size: int) -> Tensor:
        ctx.wire, ctx.dim = wire, dim
        return _all_gather(x, wire, wire.forward, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return own_piece(grad, ctx.wire, ctx.dim).contiguous(), None, None, None


class _SplitIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, dim: int) -> Tensor:
        ctx.wire, ctx.dim, ctx.size = wire, dim, x.shape[dim]
        return own_piece(x, wire, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.wire, ctx.wire.backward, ctx.dim, ctx.size), None, None
