"""Where a rank's piece of a parameter lies in the whole, and with whom it shares scales.

Codes are a function of the whole tensor, not of the mesh: random numbers go by the flat index in
the full tensor, and a scale whose block is spread over ranks comes from their common maximum.

Legend: `R` rows, `C` columns of the piece's matrix; `S G` blocks that share a scale.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from thinwire.eco.formats import Format
from thinwire.errors import ConfigError
from thinwire.kernels.random import RandomKey

__all__ = ["Piece", "find_piece", "local_like", "plain", "shard_dim"]


@dataclass(frozen=True)
class Piece:
    """This rank's piece of a parameter.

    Attributes:
        first_row: index of its first row in the whole matrix.
        first_column: index of its first column.
        rows: R.
        columns: C.
        full_columns: columns of the whole matrix.
        scale_groups: groups over which block maxima are combined; empty where scales are local.
    """

    first_row: int
    first_column: int
    rows: int
    columns: int
    full_columns: int
    scale_groups: tuple[dist.ProcessGroup, ...]

    def key(self, run_key: int, tensor: int, step: int) -> RandomKey:
        """Return where this piece's random numbers start; rows are `full_columns` apart."""
        offset = self.first_row * self.full_columns + self.first_column
        return RandomKey(run_key=run_key, tensor=tensor, step=step, offset=offset)


def shard_dim(placement: Any) -> int | None:
    """Return the dimension that a placement shards, None if it replicates."""
    return None if isinstance(placement, Replicate) else placement.dim


def find_piece(param: Tensor, lead_dims: int, fmt: Format, name: str) -> Piece:
    """Return where this rank's piece of `param` lies.

    Raises:
        ConfigError: a placement that quantized storage doesn't carry.
    """
    shape = tuple(param.shape)
    columns = math.prod(shape[lead_dims:])
    rows_per_index = math.prod(shape[1:lead_dims])
    if not isinstance(param, DTensor):
        return Piece(0, 0, math.prod(shape[:lead_dims]), columns, columns, ())
    row = _cut(param, 0, shape[0])
    column = (0, columns)
    groups = []
    for axis, placement in enumerate(param.placements):
        dim = shard_dim(placement)
        if dim is None or param.device_mesh.size(axis) == 1:
            continue
        if dim == len(shape) - 1 and lead_dims == len(shape) - 1 and dim > 0:
            column = _cut(param, dim, columns)
            _check_columns(fmt, column, columns, param.device_mesh.size(axis), name)
            if fmt.has_scales and fmt.granularity != "group":
                groups.append(param.device_mesh.get_group(axis))
        elif dim != 0:
            raise ConfigError(
                f"parameter {name!r} is sharded along dimension {dim}: quantized weights can be "
                "sharded along dimension 0, or along the last dimension by tensor parallelism"
            )
        elif fmt.shared_scale(lead_dims):
            groups.append(param.device_mesh.get_group(axis))
    return Piece(
        row[0] * rows_per_index, column[0], row[1] * rows_per_index, column[1], columns,
        tuple(groups),
    )  # fmt: skip


def _cut(param: DTensor, dim: int, size: int) -> tuple[int, int]:
    """Return (start, length) of this rank's part of a dimension.

    Chunks are cut as `torch.chunk` does, by one axis after the other; a strided placement (FSDP2
    over tensor parallelism on one dimension) is cut last.
    """
    mesh: DeviceMesh = param.device_mesh
    axes = [a for a, p in enumerate(param.placements) if shard_dim(p) == dim]
    axes.sort(key=lambda axis: hasattr(param.placements[axis], "split_factor"))
    start, length = 0, size
    for axis in axes:
        chunk = -(-length // mesh.size(axis))
        skip = min(mesh.get_local_rank(axis) * chunk, length)
        start, length = start + skip, min(chunk, length - skip)
    return start, length


def _check_columns(
    fmt: Format, column: tuple[int, int], columns: int, num_ranks: int, name: str
) -> None:
    step = {"group": fmt.group_size}.get(fmt.granularity, 2 if fmt.fmt == "int4" else 1)
    if columns % (num_ranks * step):
        raise ConfigError(
            f"parameter {name!r} has {columns} columns over {num_ranks} tensor-parallel ranks: "
            f"{fmt} needs a multiple of {num_ranks * step}"
        )


def local_like(param: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return `local` laid out as `param` is: a DTensor of the whole, or itself.

    Args:
        param: the parameter.
        local: this rank's piece of a tensor with the parameter's first dimension.
        shape: shape of the whole, by default the parameter's.
    """
    if not isinstance(param, DTensor):
        return local
    shape = tuple(param.shape) if shape is None else shape
    placements = [
        Replicate() if (dim := shard_dim(p)) is not None and dim >= len(shape) else p
        for p in param.placements
    ]
    return DTensor.from_local(
        local,
        param.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def plain(x: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor, a plain tensor as it is, without gradients."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x
