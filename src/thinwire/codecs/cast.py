"""Send a tensor as it is, or cast to another floating dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.protocol import FLOAT_DTYPES, CodecFacts, check_wire, flat_input, wire_out
from thinwire.errors import ConfigError

__all__ = ["Cast"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Half a unit in the last place of each wire type, relative to the largest element.
_MAX_ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11 + 2.0**-24}

# Elements added at a time: a piece and its widened copy stay in the cache.
_PIECE = 2**16


@dataclass(frozen=True)
class Cast:
    """Send every element in `dtype` ("fp32", "bf16", "fp16"), or unchanged with None.

    Sums of decoded buffers run in fp32 (fp64 for fp64 input, which only None carries). NaN and
    infinity travel as they are.

    Example:
        >>> Cast("bf16").wire_nbytes(10, torch.float32)
        20
    """

    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be None or one of {sorted(_DTYPES)}, got {self.dtype!r}")

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""
        error = 0.0 if self.dtype is None else _MAX_ERROR[self.dtype]
        return CodecFacts(exact=error == 0.0, max_error=error, flags_nonfinite=False)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype is None else _DTYPES[self.dtype]

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact buffer length in bytes."""
        return numel * self._wire_dtype(dtype).itemsize

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]."""
        x = flat_input(x, self, (*FLOAT_DTYPES, torch.float64))
        out = wire_out(out, self.wire_nbytes(x.numel(), x.dtype), x.device)
        wire_dtype = self._wire_dtype(x.dtype)
        if _aligned(out, wire_dtype):
            out.view(wire_dtype).copy_(x)  # one pass: read, round, write
        else:
            out.copy_(x.to(wire_dtype).view(torch.uint8))
        return out

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W], or [R, N] from [R, W]."""
        check_wire(wire, self.wire_nbytes(numel, dtype), self)
        values = _view(wire, self._wire_dtype(dtype))
        if out is None:
            return values.to(dtype, copy=True)
        out.copy_(values)
        return out

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 (fp64 for fp64) sum [N] of R buffers [R, W] in rank order."""
        check_wire(wires, self.wire_nbytes(numel, dtype), self)
        values = _view(wires, self._wire_dtype(dtype))
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        total = torch.empty(numel, dtype=acc, device=wires.device)
        # In pieces: torch widens what it adds in a buffer of its own.
        for begin in range(0, numel, _PIECE):
            part = total[begin : begin + _PIECE]
            part.copy_(values[0, begin : begin + _PIECE])
            for row in values[1:]:
                part += row[begin : begin + _PIECE]
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]."""
        return self.encode(self.decode_sum(wires, numel, dtype).to(dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return 0: NaN and infinity are carried, not flagged."""
        return 0


def _aligned(wire: Tensor, dtype: torch.dtype) -> bool:
    size = dtype.itemsize
    return wire.storage_offset() % size == 0 and wire.data_ptr() % size == 0


def _view(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes as `dtype`, copied first where they are not aligned for it."""
    if not (_aligned(wire, dtype) and wire.is_contiguous()):
        wire = wire.clone(memory_format=torch.contiguous_format)
    length = wire.shape[-1] // dtype.itemsize
    return wire.view(-1).view(dtype).view(*wire.shape[:-1], length)
