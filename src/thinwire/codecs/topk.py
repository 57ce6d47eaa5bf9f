"""SparseLoCo's codec: the largest entries of every chunk, 12-bit indices, 2-bit values."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.protocol import CodecFacts, check_wire, flat_input, wire_out
from thinwire.errors import ConfigError, WireError
from thinwire.kernels import topk as kernel

__all__ = ["TopK"]


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Keep the `k` of 4096 elements largest in magnitude, per tile of a matrix.

    Attributes:
        k: entries kept per 4096 elements; a chunk of n cells keeps max(1, round(n*k/4096)).
        shape: the tensor's shape: a matrix is cut into tiles, three dimensions are a batch of
            matrices; None: a flat run of tile^2 elements per chunk.
        quant: "sym" (per chunk sign, magnitude bit and two levels), "paper" (four levels per
            tensor) or "none" (fp32).
        level: type of the two levels: "fp16" or "bf16" (wider range, fewer digits).
        chunking: "pad" (tiles with partial edges), "paper" (the same cuts) or "reference" (tile
            sides are the largest divisors of the matrix's; degenerates at prime sizes).
        tile: side of a tile, at most 64.

    Reference: Sarfi et al., "SparseLoCo", arXiv 2508.15706.
    """

    k: int = 64
    shape: tuple[int, ...] | None = None
    quant: str = "sym"
    level: str = "fp16"
    chunking: str = "pad"
    tile: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 4096:
            raise ConfigError(f"k must be from 1 to 4096 (entries per 4096), got {self.k!r}")
        if self.quant not in ("sym", "paper", "none"):
            raise ConfigError(f"quant must be 'sym', 'paper' or 'none', got {self.quant!r}")
        if self.level not in kernel.LEVELS:
            raise ConfigError(f"level must be 'fp16' or 'bf16', got {self.level!r}")
        if self.chunking not in ("pad", "paper", "reference"):
            raise ConfigError(
                f"chunking must be 'pad', 'paper' or 'reference', got {self.chunking!r}"
            )
        if not 1 <= self.tile <= 64:
            raise ConfigError(f"tile must be from 1 to 64 (12-bit indices), got {self.tile!r}")

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""
        return CodecFacts(max_error=None)

    def geometry(self, numel: int) -> kernel.Geometry:
        """Return the chunks of a message; ConfigError where `shape` has another size."""
        if self.shape is not None and math.prod(self.shape) != numel:
            raise ConfigError(f"{self!r} codes {math.prod(self.shape)} elements, got {numel}")
        return kernel.geometry(*self._cut(numel))

    def _cut(self, numel: int) -> tuple[tuple[int, ...], int, str, int]:
        shape = (numel,) if self.shape is None else tuple(self.shape)
        return shape, self.k, self.chunking, self.tile

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact buffer length in bytes; the same for every dtype."""
        return kernel.wire_nbytes(self.geometry(numel), self.quant)

    def _args(self, numel: int) -> tuple[list[int], int, str, int, str, str]:
        shape, k, chunking, tile = self._cut(numel)
        return list(shape), k, chunking, tile, self.quant, self.level

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]."""
        x = flat_input(x, self)
        out = wire_out(out, self.wire_nbytes(x.numel(), x.dtype), x.device)
        kernel.encode_(x, out, *self._args(x.numel()))
        return out

    def encode_feedback(
        self,
        delta: Tensor,
        residual: Tensor,
        beta: float,
        *,
        new_residual: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the message of a = beta*residual + delta; write a - decoded to new_residual.

        One pass over the data: accumulate, select, quantize and subtract.

        Args:
            delta: any shape, fp32, bf16 or fp16.
            residual: fp32, contiguous, as many elements; kept as it is.
            beta: decay of the residual.
            new_residual: fp32, contiguous, not overlapping `residual`.
            out: None or the buffer to write.
        """
        delta = flat_input(delta, self)
        for name, part in (("residual", residual), ("new_residual", new_residual)):
            if part.dtype != torch.float32 or not part.is_contiguous():
                raise ConfigError(f"{name} must be contiguous fp32, got {part.dtype}")
            if part.numel() != delta.numel():
                raise ConfigError(f"{name} has {part.numel()} elements, delta {delta.numel()}")
        out = wire_out(out, self.wire_nbytes(delta.numel(), delta.dtype), delta.device)
        flat = residual.view(-1), new_residual.view(-1)
        kernel.feedback_(delta, *flat, beta, out, *self._args(delta.numel()))
        return out

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W], or [R, N] from [R, W]; WireError for impossible indices."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        if out is None:
            out = torch.empty(*wire.shape[:-1], numel, dtype=dtype, device=wire.device)
        kernel.decode_(rows, out if out.dim() == 2 else out.unsqueeze(0), *self._args(numel))
        return out

    def entries(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return what one message [W] holds: flat positions int64 [K] and fp32 values [K].

        Raises:
            WireError: indices that no encoder writes.
        """
        check_wire(wire, self.wire_nbytes(numel, torch.float32), self)
        count = self.geometry(numel).entries
        position = torch.empty(count, dtype=torch.int64, device=wire.device)
        value = torch.empty(count, device=wire.device)
        kernel.entries_(wire, position, value, *self._args(numel))
        return position, value

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W] in rank order."""
        rows = check_wire(wires, self.wire_nbytes(numel, dtype), self)
        total = torch.zeros(numel, dtype=torch.float32, device=wires.device)
        kernel.add_(rows, total, *self._args(numel))
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]."""
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return how many chunks (paper: tensors; none: entries) are marked as not finite."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        geo = self.geometry(numel)
        if geo.entries == 0:
            return 0
        if self.quant == "sym":
            levels = rows[:, : 4 * geo.chunks].clone(memory_format=torch.contiguous_format)
            finite = torch.isfinite(levels.view(kernel.LEVELS[self.level]).view(-1, 2)).all(1)
        elif self.quant == "paper":
            finite = torch.isfinite(_fp32(rows[:, :20]).view(-1, 5)).all(1)
        else:
            begin = geo.index_nbytes
            finite = torch.isfinite(_fp32(rows[:, begin : begin + 4 * geo.entries]))
        return int((~finite).sum())

    def check_finite(self, wire: Tensor, numel: int, dtype: torch.dtype) -> None:
        """Raise WireError where a message carries values that are not finite."""
        count = self.nonfinite_count(wire, numel, dtype)
        if count:
            raise WireError(f"{self!r}: {count} parts of a message are not finite")


def _fp32(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
