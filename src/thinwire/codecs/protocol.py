"""What a codec is: a stateless map from a tensor to one uint8 buffer and back.

Legend: `N` elements, `W` wire bytes of one message, `R` messages.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.errors import ConfigError, WireError

__all__ = ["FLOAT_DTYPES", "Codec", "CodecFacts", "check_wire", "flat_input", "wire_out"]

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecFacts:
    """What a codec promises; the contract tests hold every codec to it.

    Attributes:
        exact: decode(encode(x)) equals x bit for bit, for x of the dtype that travels.
        deterministic: equal input gives equal bytes, on every rank, device and call.
        unbiased: the mean of decode(encode(x)) over the codec's random keys is x.
        linear: decode is linear in x for a fixed selection (projection, not rounding).
        max_error: bound on |decode(encode(x)) - x| / max|x| over a finite message, or None where
            no such bound exists (a codec that drops elements).
        granule: elements per block; a message that is cut into chunks is cut at multiples of it.
        flags_nonfinite: NaN and infinity are marked in the buffer (`Codec.nonfinite_count`); a
            codec that carries them as they are says False.
    """

    exact: bool = False
    deterministic: bool = True
    unbiased: bool = False
    linear: bool = False
    max_error: float | None = None
    granule: int = 1
    flags_nonfinite: bool = True


@runtime_checkable
class Codec(Protocol):
    """Encode a floating tensor into one contiguous uint8 buffer, and back.

    Implementations are frozen dataclasses: no state, no ranks, hashable, with a `repr` that
    rebuilds them. Input dtypes are fp32, bf16 and fp16; input is flattened row-major.
    """

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact length in bytes of the buffer for `numel` elements of `dtype`."""

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]; `out`, if given, is a contiguous uint8 [W] to write into."""

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from one buffer [W], or [R, N] from buffers [R, W].

        `out`, if given, has that shape and the dtype `dtype`, and stride 1 in its last dimension
        (rows may be strided, so that a segment of a larger buffer can be written in place).
        """

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W], added in rank order 0..R-1."""

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]: the middle of a two-shot sum."""

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return how many blocks of [W] or [R, W] are marked as holding NaN or infinity."""


def flat_input(x: Tensor, codec: object, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> Tensor:
    """Return x as a contiguous 1-D tensor, or raise ConfigError for a dtype the codec lacks."""
    if x.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ConfigError(f"{codec!r} encodes {names}, not {x.dtype}: cast the tensor first")
    return x.detach().contiguous().view(-1)


def wire_out(out: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    """Return `out` after checking it, or a new uint8 buffer of `nbytes`."""
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if out.dtype != torch.uint8 or out.shape != (nbytes,) or not out.is_contiguous():
        raise WireError(
            f"out must be a contiguous uint8 buffer of {nbytes} bytes, "
            f"got {out.dtype} {tuple(out.shape)}"
        )
    return out


def check_wire(wire: Tensor, nbytes: int, codec: object) -> Tensor:
    """Return the buffer(s) as uint8 [R, W] with stride 1 inside a row, or raise WireError."""
    if wire.dtype != torch.uint8:
        raise WireError(f"{codec!r} decodes uint8 buffers, got {wire.dtype}")
    if wire.dim() not in (1, 2) or wire.shape[-1] != nbytes:
        raise WireError(
            f"{codec!r} expects {nbytes} bytes per message, got a buffer of shape "
            f"{tuple(wire.shape)}: truncated, or made with another codec, length or dtype"
        )
    rows = wire if wire.dim() == 2 else wire.unsqueeze(0)
    return rows if rows.stride(-1) == 1 or nbytes <= 1 else rows.contiguous()
