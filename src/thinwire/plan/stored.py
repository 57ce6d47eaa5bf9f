"""Weights that lie quantized in memory (`thinwire.eco`), as the cost model sees them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import CodecFacts
from thinwire.eco.formats import Blocks, Format
from thinwire.eco.rounding import decode, encode
from thinwire.eco.tensor import Stored

__all__ = ["Storage", "StoredCodec"]

# Columns of the matrix whose coding is timed: a row's scale costs something, too.
COLUMNS = 512


@dataclass(frozen=True)
class StoredCodec:
    """A storage format in a codec's place, so that its speed can be probed and looked up.

    Values are taken as a matrix of `COLUMNS` columns, the last row filled up with zeros. It sends
    nothing: messages of stored weights are sized by `Format.nbytes`.

    Attributes:
        fmt: the format.
    """

    fmt: Format

    @property
    def facts(self) -> CodecFacts:
        """Return what it promises."""
        return CodecFacts(granule=COLUMNS, flags_nonfinite=False)

    def _blocks(self, numel: int) -> Blocks:
        return self.fmt.blocks((-(-numel // COLUMNS), COLUMNS), 1)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of codes and scales."""
        return self.fmt.nbytes((-(-numel // COLUMNS), COLUMNS), 1)

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return codes, then scales, uint8 [W]."""
        blocks = self._blocks(x.numel())
        values = x.new_zeros(blocks.rows, COLUMNS, dtype=torch.float32)
        values.view(-1)[: x.numel()] = x.view(-1)
        parts = [part.view(-1).view(torch.uint8) for part in encode(values, self.fmt, blocks)]
        wire = torch.cat(parts)
        return wire if out is None else out.copy_(wire)

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W], or [R, N] from [R, W]."""
        if wire.dim() > 1:
            values = torch.stack([self.decode(one, numel, dtype) for one in wire])
        else:
            blocks = self._blocks(numel)
            codes, scales = wire.split(
                [
                    wire.numel() - 4 * math.prod(blocks.scale_shape),
                    4 * math.prod(blocks.scale_shape),
                ]
            )
            codes = codes.view(torch.bfloat16) if self.fmt.fmt == "bf16" else codes
            whole = decode(
                codes.view(blocks.rows, -1), scales.view(torch.float32), self.fmt, blocks
            )
            values = whole.view(-1)[:numel].to(dtype)
        return values if out is None else out.copy_(values)

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W]."""
        return self.decode(wires, numel, torch.float32).sum(0)

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the buffer of that sum."""
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return 0: stored weights are finite."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Which weights lie quantized, and what their optimizer agrees on.

    Attributes:
        fmt: how they are stored.
        names: full names of the stored matrices.
        flag_bytes: of the all-reduces of a step over all ranks, one each.
        maxima_bytes: per mesh axis, bytes of the all-reduces of block maxima that ranks share.
        beside: bytes per stored weight of what is kept beside codes and scales: a master copy, the
            errors of Kahan sums.
    """

    fmt: Format
    names: frozenset[str]
    flag_bytes: tuple[int, ...] = ()
    maxima_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    beside: int = 0

    @property
    def codec(self) -> StoredCodec:
        """Return what stands for the format's speed."""
        return StoredCodec(self.fmt)

    def message_nbytes(self, name: str, shape: tuple[int, ...], num_ranks: int) -> int:
        """Return the bytes that one of `num_ranks` sends of a stored matrix in a gather."""
        return Stored(name, self.fmt, 1, shape).message_nbytes(num_ranks)
