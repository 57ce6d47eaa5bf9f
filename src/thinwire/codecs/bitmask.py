"""Masks as messages: packed bits, 12-bit indices, or whichever of the two is shorter."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.protocol import FLOAT_DTYPES, CodecFacts, check_wire, wire_out
from thinwire.errors import ConfigError, WireError
from thinwire.kernels import bitmask as kernel

__all__ = ["Bitmask", "decode_delta", "encode_delta"]


@dataclass(frozen=True, kw_only=True)
class Bitmask:
    """Send which `k` elements of a tensor are set.

    As a codec it encodes x != 0 (which must hold for exactly k elements) and decodes ones and
    zeros; `encode_index` and `decode_index` speak sorted positions, without a dense tensor.

    Attributes:
        k: elements set.
        form: "bits" (ceil(n/8) bytes), "index12" (2 bytes per 4096 elements and 12 bits per
            position), or "auto": the shorter of the two, ties to bits, known from n and k alone.

    Example:
        >>> Bitmask(k=5).encode_index(torch.tensor([0, 3, 8, 9, 15]), 17).tolist()
        [9, 131, 0]
    """

    k: int
    form: str = "auto"

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ConfigError(f"k must not be negative, got {self.k!r}")
        if self.form not in ("auto", "bits", "index12"):
            raise ConfigError(f"form must be 'auto', 'bits' or 'index12', got {self.form!r}")

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""
        return CodecFacts(max_error=None, flags_nonfinite=False)

    def form_for(self, numel: int) -> str:
        """Return "bits" or "index12" for a tensor of `numel` elements."""
        if self.form != "auto":
            return self.form
        shorter = kernel.index12_nbytes(numel, self.k) < kernel.bits_nbytes(numel)
        return "index12" if shorter else "bits"

    def wire_nbytes(self, numel: int, dtype: torch.dtype = torch.bool) -> int:
        """Return the exact buffer length in bytes; the same for every dtype."""
        if self.form_for(numel) == "bits":
            return kernel.bits_nbytes(numel)
        return kernel.index12_nbytes(numel, self.k)

    def encode_index(self, index: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        """Return positions int64 [k], ascending and below numel, as uint8 [W]."""
        if index.numel() != self.k or index.dtype != torch.int64:
            raise ConfigError(
                f"{self!r} encodes int64 [{self.k}], got {index.dtype} {tuple(index.shape)}"
            )
        if self.k and not 0 <= int(index[0]) <= int(index[-1]) < numel:
            raise ConfigError(f"positions must ascend from 0 to {numel - 1}")
        out = wire_out(out, self.wire_nbytes(numel), index.device)
        write = kernel.to_bits if self.form_for(numel) == "bits" else kernel.to_index12
        write(index.contiguous(), numel, out)
        return out

    def decode_index(self, wire: Tensor, numel: int) -> Tensor:
        """Return positions int64 [k] of one message; WireError for what no encoder writes."""
        row = check_wire(wire, self.wire_nbytes(numel), self)[0]
        if self.k > numel:
            raise WireError(f"{self!r} cannot describe {numel} elements")
        read = kernel.from_bits if self.form_for(numel) == "bits" else kernel.from_index12
        return read(row, numel, self.k)

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x != 0 as uint8 [W]."""
        if x.dtype not in (*FLOAT_DTYPES, torch.bool):
            raise ConfigError(f"{self!r} encodes bool and floating tensors, not {x.dtype}")
        index = x.detach().reshape(-1).nonzero().view(-1)
        if index.numel() != self.k:
            raise ConfigError(f"{self!r} needs {self.k} elements set, got {index.numel()}")
        return self.encode_index(index, x.numel(), out=out)

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return ones and zeros [N] from [W], or [R, N] from [R, W]."""
        rows = check_wire(wire, self.wire_nbytes(numel), self)
        if out is None:
            out = torch.empty(*wire.shape[:-1], numel, dtype=dtype, device=wire.device)
        for row, target in zip(rows, out if out.dim() == 2 else out.unsqueeze(0), strict=True):
            target.zero_()
            target[self.decode_index(row, numel)] = 1
        return out

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return how many of R messages [R, W] set each element, fp32 [N]."""
        total = torch.zeros(numel, dtype=torch.float32, device=wires.device)
        for wire in wires:
            total[self.decode_index(wire, numel)] += 1
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message of the union, which must have k elements too."""
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return 0: a mask has no values."""
        return 0


def encode_delta(old: Tensor, new: Tensor, numel: int) -> Tensor:
    """Return a mask as keep bits over the old one and the added positions as index12.

    Args:
        old: positions int64 [k_old], ascending, known to the receivers.
        new: positions int64 [k_new], ascending.
        numel: elements of the tensor.
    """
    kept, fresh = torch.isin(old, new), ~torch.isin(new, old)
    added = new[fresh]
    keep_nbytes = kernel.bits_nbytes(old.numel())
    total = keep_nbytes + kernel.index12_nbytes(numel, added.numel())
    wire = torch.empty(total, dtype=torch.uint8, device=new.device)
    kernel.to_bits(kept.nonzero().view(-1), old.numel(), wire[:keep_nbytes])
    kernel.to_index12(added, numel, wire[keep_nbytes:])
    return wire


def decode_delta(wire: Tensor, old: Tensor, numel: int, k: int) -> Tensor:
    """Return positions int64 [k] from `encode_delta`'s message and the old positions.

    Raises:
        WireError: a length or content that does not give k positions.
    """
    keep_nbytes = kernel.bits_nbytes(old.numel())
    if wire.dtype != torch.uint8 or wire.numel() < keep_nbytes:
        raise WireError(f"a delta mask has at least {keep_nbytes} bytes, got {wire.numel()}")
    bits = (wire[:keep_nbytes, None] >> torch.arange(8, device=wire.device)) & 1
    flags = bits.view(-1)
    if bool(flags[old.numel() :].any()):
        raise WireError("a delta mask keeps positions beyond the old mask")
    kept = old[flags[: old.numel()].bool()]
    missing = k - kept.numel()
    if missing < 0 or wire.numel() != keep_nbytes + kernel.index12_nbytes(numel, missing):
        raise WireError(f"a delta mask does not give {k} positions")
    added = kernel.from_index12(wire[keep_nbytes:], numel, missing)
    index = torch.cat([kept, added]).sort().values
    if k and bool((index[1:] == index[:-1]).any()):
        raise WireError("a delta mask adds positions that it keeps")
    return index
