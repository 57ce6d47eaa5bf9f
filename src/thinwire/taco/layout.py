"""Change the layout of a tensor on a 1-D mesh, as DTensor's redistribute does, over a link.

Which region serves which change (S: Shard, R: Replicate, P: Partial):

| from | to | region           | gradient of the result |
|------|----|------------------|------------------------|
| R    | R  | `copy_in`        | partial                |
| S    | R  | `gather`         | partial                |
| S    | R  | `gather_out`     | replicated (`whole_grad`) |
| P    | R  | `reduce_out`     | replicated             |
| P    | S  | `scatter_reduce` | sharded                |
| R    | S  | `split_in`       | sharded                |
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from thinwire import _compat
from thinwire.errors import ConfigError
from thinwire.taco import regions
from thinwire.taco.link import Wire

__all__ = ["check_move", "move", "shard_dim", "whole_size"]

ALL_TO_ALL = (
    "an all-to-all, which this link does not carry (go through Replicate, or give the module "
    "torch's own style)"
)


def check_move(src: Placement, dst: Placement, what: str) -> None:
    """Raise ConfigError for a change of layout that no region serves."""
    kinds = (Replicate, Shard, Partial)
    if type(src) not in kinds or type(dst) not in kinds or isinstance(dst, Partial):
        raise ConfigError(f"{what}: no compressed way from {src} to {dst}; use Shard or Replicate")
    if isinstance(src, Partial) and src.reduce_op != "sum":
        raise ConfigError(f"{what}: partial values are summed, not combined by {src.reduce_op!r}")
    # Shard(-1) and Shard(2) may be the same: only the tensor tells.
    if (
        isinstance(src, Shard)
        and isinstance(dst, Shard)
        and src.dim != dst.dim
        and (src.dim < 0) == (dst.dim < 0)
    ):
        raise ConfigError(f"{what}: {ALL_TO_ALL}: {src} to {dst}")


def move(
    x: Tensor,
    src: Placement,
    dst: Placement,
    mesh: DeviceMesh,
    wire: Wire,
    *,
    whole_grad: bool = False,
    size: int | None = None,
) -> DTensor:
    """Return x laid out as `dst`.

    Args:
        x: floating DTensor, or the local tensor of one.
        src: the layout of a local tensor; a DTensor's own layout counts instead.
        dst: the layout wanted, Shard or Replicate.
        mesh: 1-D device mesh.
        wire: the link, bound to the mesh's group.
        whole_grad: a Replicate result is used alike on all ranks, so that its gradient is
            replicated, not a partial sum per rank.
        size: length of the whole along `src.dim`, where the caller knows it.

    Raises:
        ConfigError: no region serves this change.
    """
    if isinstance(x, DTensor):
        if len(x.placements) != 1:
            raise ConfigError(f"expected a DTensor on a 1-D mesh, got placements {x.placements}")
        src = x.placements[0]
    # Methods and numbers alone from here on: torch.compile can't compare placements.
    if src.is_shard():
        return _from_shard(x, shard_dim(src, x), dst, mesh, wire, whole_grad, size)
    local = _to_local(x)
    if dst.is_shard():
        dim = shard_dim(dst, x)
        region = regions.scatter_reduce if src.is_partial() else regions.split_in
        return _as_shard(region(local, wire, dim), dim, x.shape, mesh)
    if src.is_partial():
        local = regions.reduce_out(local, wire)
    if whole_grad or src.is_partial():
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    return _compat.from_local_partial_grad(regions.copy_in(local, wire), mesh)


def _from_shard(
    x: Tensor,
    dim: int,
    dst: Placement,
    mesh: DeviceMesh,
    wire: Wire,
    whole_grad: bool,
    size: int | None,
) -> DTensor:
    if size is None:
        size = whole_size(x, dim, wire)
    if dst.is_shard():
        if shard_dim(dst, x) != dim:
            raise ConfigError(f"{ALL_TO_ALL}: from dimension {dim} to {shard_dim(dst, x)}")
        if isinstance(x, DTensor):
            return x
        return _as_shard(x, dim, (*x.shape[:dim], size, *x.shape[dim + 1 :]), mesh)
    region = regions.gather_out if whole_grad else regions.gather
    whole = region(_to_local(x), wire, dim, size)
    if whole_grad:
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return _compat.from_local_partial_grad(whole, mesh)


def whole_size(x: Tensor, dim: int, wire: Wire) -> int:
    """Return the length of the whole of which x is a piece along `dim`.

    A DTensor knows it; plain pieces count as equal, unless the link asks the other ranks.
    """
    if isinstance(x, DTensor):
        return x.shape[dim]
    if not wire.uneven:
        return x.shape[dim] * wire.num_ranks
    own = torch.tensor([x.shape[dim]], dtype=torch.int64, device=x.device)
    sizes = own.new_empty(wire.num_ranks)
    _compat.all_gather_single(sizes, own, group=_compat.group_from_name(wire.group))
    _check_pieces(sizes.tolist(), dim)
    return int(sizes.sum())


def _check_pieces(sizes: list[int], dim: int) -> None:
    if sizes != regions.piece_sizes(sum(sizes), len(sizes)):
        raise ConfigError(
            f"pieces of lengths {sizes} along dimension {dim}: ranks must hold the pieces that "
            f"torch.chunk cuts, {regions.piece_sizes(sum(sizes), len(sizes))}"
        )


def _to_local(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    # A partial sum's gradient is the whole gradient, on every rank.
    grads = [Replicate()] if x.placements[0].is_partial() else None
    return x.to_local(grad_placements=grads)


def _as_shard(local: Tensor, dim: int, shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def shard_dim(shard: Placement, x: Tensor) -> int:
    """Return the dimension of x that a Shard cuts, counted from the front."""
    dim: int = shard.dim  # type: ignore[attr-defined]
    return dim if dim >= 0 else dim + x.dim()
