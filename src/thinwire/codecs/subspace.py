"""Send k coefficients in a shared subspace in place of d channels."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.codecs.protocol import CodecFacts, check_wire, flat_input, wire_out
from thinwire.errors import ConfigError

__all__ = ["Subspace", "expand", "make_basis", "project"]

# Elements worked on at a time on a CPU.
_PANEL = 2**17
_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@lru_cache(maxsize=32)
def make_basis(dim: int, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return orthonormal columns [dim, rank] in `dtype`, the same for equal arguments.

    A Gaussian matrix in fp64 on the CPU, QR, columns signed so that R has a positive diagonal.
    LAPACK builds may differ in the last bits: ranks compare a hash and take the leader's bytes.
    """
    gaussian = torch.randn(
        dim, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    q, r = torch.linalg.qr(gaussian)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).to(dtype)


def project(x: Tensor, basis: Tensor | int) -> Tensor:
    """Return z = x U [..., rank] of x [..., dim], summed in x's dtype or better.

    Args:
        x: rows [..., dim]; pass fp32 (or fp64) for fp32 accumulation.
        basis: U [dim, rank], or a rank k for the coordinate basis: the first k channels.
    """
    return x[..., :basis] if isinstance(basis, int) else x @ basis


def expand(z: Tensor, basis: Tensor | int, dim: int) -> Tensor:
    """Return z U^T [..., dim] of z [..., rank] (coordinate basis: zero-padded)."""
    if isinstance(basis, int):
        return torch.nn.functional.pad(z, (0, dim - basis))
    return z @ basis.mT


@dataclass(frozen=True, kw_only=True)
class Subspace:
    """Project rows of `dim` channels on `rank` shared directions, and expand them again.

    Products are in fp32 and are rounded once to the wire dtype (ties to even). What lies outside
    the subspace is lost. NaN and infinity travel as they are.

    Attributes:
        dim: channels per row; the message's element count is a multiple.
        rank: coefficients per row, 1 to dim.
        basis: "random" (`make_basis`) or "coord" (the first `rank` channels; exact selection).
        seed: of the random basis.
        wire: "bf16", "fp16" or "fp32".

    Reference: "Subspace Networks", arXiv 2506.01260; the coordinate basis is thinwire's.
    """

    dim: int
    rank: int
    basis: str = "random"
    seed: int = 0
    wire: str = "bf16"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.dim:
            raise ConfigError(f"rank must be from 1 to dim={self.dim}, got {self.rank!r}")
        if self.basis not in ("random", "coord"):
            raise ConfigError(f"basis must be 'random' or 'coord', got {self.basis!r}")
        if self.wire not in _WIRE:
            raise ConfigError(f"wire must be one of {sorted(_WIRE)}, got {self.wire!r}")

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""
        return CodecFacts(linear=True, max_error=None, flags_nonfinite=False)

    def matrix(self, device: torch.device) -> Tensor | int:
        """Return U on `device`, or the rank for the coordinate basis (see `project`)."""
        if self.basis == "coord":
            return self.rank
        return make_basis(self.dim, self.rank, self.seed).to(device)

    def _rows(self, numel: int) -> int:
        if numel % self.dim:
            raise ConfigError(f"{self!r} codes rows of {self.dim} channels, got {numel} elements")
        return numel // self.dim

    @property
    def _row_nbytes(self) -> int:
        return self.rank * _WIRE[self.wire].itemsize

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact buffer length in bytes; the same for every dtype."""
        return self._rows(numel) * self._row_nbytes

    def _panels(self, rows: int, device: torch.device) -> Iterator[slice]:
        """Yield slices of rows worked on at a time: their fp32 copies stay small on a CPU."""
        step = max(1, _PANEL // self.dim) if device.type == "cpu" else max(1, rows)
        for begin in range(0, rows, step):
            yield slice(begin, min(begin + step, rows))

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]."""
        x = flat_input(x, self)
        out = wire_out(out, self.wire_nbytes(x.numel(), x.dtype), x.device)
        x_ND, basis = x.view(-1, self.dim), self.matrix(x.device)
        bytes_NW = out.view(x_ND.shape[0], self._row_nbytes)
        for rows in self._panels(x_ND.shape[0], x.device):
            z = project(x_ND[rows].float(), basis).to(_WIRE[self.wire]).contiguous()
            bytes_NW[rows] = z.view(torch.uint8)
        return out

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W], or [R, N] from [R, W]."""
        messages = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        if out is None:
            out = torch.empty(*wire.shape[:-1], numel, dtype=dtype, device=wire.device)
        for message, target in zip(messages, out if out.dim() == 2 else out[None], strict=True):
            for rows, x in self._expand(message, numel):
                target[rows.start * self.dim : rows.stop * self.dim] = x.view(-1)
        return out

    def _expand(self, message: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield fp32 rows [.., dim] of a message, a panel at a time."""
        basis, count = self.matrix(message.device), self._rows(numel)
        bytes_NW = message.view(count, self._row_nbytes)
        for rows in self._panels(count, message.device):
            # A copy, so that the wider view is aligned wherever the message starts.
            z = bytes_NW[rows].clone(memory_format=torch.contiguous_format)
            yield rows, expand(z.view(_WIRE[self.wire]).float(), basis, self.dim)

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W] in rank order."""
        messages = check_wire(wires, self.wire_nbytes(numel, dtype), self)
        total = torch.zeros(numel, dtype=torch.float32, device=wires.device)
        for message in messages:
            for rows, x in self._expand(message, numel):
                total[rows.start * self.dim : rows.stop * self.dim] += x.view(-1)
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]."""
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return 0: NaN and infinity are carried, not flagged."""
        return 0
