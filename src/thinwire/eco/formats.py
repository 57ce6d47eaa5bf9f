"""Storage formats of weights, and how a tensor's shape maps onto codes and scales.

Legend: `R` rows, `C` columns of the matrix that a tensor is stored as; `S G` blocks with one scale.
"""

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError

__all__ = ["FORMATS", "Blocks", "Format"]

FORMATS = ("fp8_e4m3", "int8", "int4", "bf16")
GRANULARITIES = ("row", "tensor", "group")


@dataclass(frozen=True)
class Blocks:
    """A tensor as a matrix cut into blocks that share a scale.

    Attributes:
        lead: sizes of the leading dimensions; their product is R.
        columns: C.
        rows_per_scale: rows of a block.
        cols_per_scale: columns of a block.
        scale_shape: shape of the scales tensor; its first dimension is the tensor's, unless one
            scale serves the whole matrix.
    """

    lead: tuple[int, ...]
    columns: int
    rows_per_scale: int
    cols_per_scale: int
    scale_shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Return R."""
        return math.prod(self.lead)


@dataclass(frozen=True)
class Format:
    """How weights are stored.

    Attributes:
        fmt: "fp8_e4m3", "int8", "int4", or "bf16" (no scales).
        granularity: which weights share a scale: "row" (an output channel), "tensor" (a matrix),
            or "group" (`group_size` consecutive weights of a row).
        group_size: weights of a group.
        pow2_scale: round scales up to powers of two, so that code * scale is exact in bf16.

    Raises:
        ConfigError: an unknown format or granularity, or an odd int4 group.
    """

    fmt: str = "fp8_e4m3"
    granularity: str = "row"
    group_size: int = 32
    pow2_scale: bool = False

    def __post_init__(self) -> None:
        if self.fmt not in FORMATS:
            raise ConfigError(f"fmt must be one of {', '.join(FORMATS)}, got {self.fmt!r}")
        if self.granularity not in GRANULARITIES:
            raise ConfigError(
                f"granularity must be row, tensor or group:N, got {self.granularity!r}"
            )
        if self.group_size < 1 or (self.fmt == "int4" and self.group_size % 2):
            raise ConfigError(f"group size must be positive, even for int4: got {self.group_size}")

    @classmethod
    def parse(cls, fmt: str, granularity: str | None = None, pow2_scale: bool = False) -> "Format":
        """Return the format of `fmt` and "row", "tensor", "group:N" or None for the default."""
        if granularity is None:
            granularity = "tensor" if fmt == "int4" else "row"
        kind, _, size = granularity.partition(":")
        if size and not size.isdecimal():
            raise ConfigError(f"granularity must be row, tensor or group:N, got {granularity!r}")
        return cls(fmt, kind, int(size) if size else 32, pow2_scale)

    @property
    def bits(self) -> int:
        """Return bits of a code."""
        return {"fp8_e4m3": 8, "int8": 8, "int4": 4, "bf16": 16}[self.fmt]

    @property
    def has_scales(self) -> bool:
        """Return whether codes need scales."""
        return self.fmt != "bf16"

    def __str__(self) -> str:
        """Return for example "int4 group:32"."""
        if not self.has_scales:
            return self.fmt
        size = f":{self.group_size}" if self.granularity == "group" else ""
        return f"{self.fmt} {self.granularity}{size}{' pow2' if self.pow2_scale else ''}"

    def code_columns(self, columns: int) -> int:
        """Return the stored elements of a row of `columns` weights."""
        return -(-columns // 2) if self.fmt == "int4" else columns

    def blocks(self, shape: tuple[int, ...], lead_dims: int) -> Blocks:
        """Return how a tensor of this shape is cut.

        Tensors of more than two dimensions are stacks of matrices (experts), each with scales of
        its own; a convolution (`lead_dims` 1) is one matrix, its output channels the rows.
        """
        lead, columns = tuple(shape[:lead_dims]), math.prod(shape[lead_dims:])
        if not self.has_scales:
            return Blocks(lead, columns, 1, max(1, columns), (0,))
        if self.granularity == "row":
            return Blocks(lead, columns, 1, max(1, columns), lead)
        if self.granularity == "group":
            groups = max(1, -(-columns // self.group_size))
            return Blocks(lead, columns, 1, self.group_size, (*lead, groups))
        if len(lead) > 1:
            return Blocks(lead, columns, lead[-1], max(1, columns), lead[:-1])
        return Blocks(lead, columns, max(1, lead[0]), max(1, columns), (1,))

    def shared_scale(self, lead_dims: int) -> bool:
        """Return whether a cut along dimension 0 splits a scale."""
        return self.granularity == "tensor" and lead_dims == 1 and self.has_scales

    def nbytes(self, shape: tuple[int, ...], lead_dims: int = 1) -> int:
        """Return the bytes of codes and scales of a tensor."""
        b = self.blocks(shape, lead_dims)
        code_bytes = b.rows * self.code_columns(b.columns) * (2 if self.fmt == "bf16" else 1)
        return code_bytes + 4 * math.prod(b.scale_shape)
