"""How the k coefficients of a token travel through torch's pipelining, forward and backward.

A plain cast is ordinary autograd: the coefficients' gradient comes back in the wire dtype. Codec
bytes travel as a float tensor that autograd hands on untouched: the forward's holds the bytes of z,
its "gradient" those of g_z, of the same length.

Legend: `B` sequences, `T` tokens, `K` coefficients, `W` bytes.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Blockwise
from thinwire.codecs.protocol import Codec
from thinwire.errors import ConfigError

__all__ = ["Carrier", "make_carrier"]

_CASTS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_CODECS = {"int8": Blockwise(bits=8, block_size=64), "int4": Blockwise(bits=4, block_size=64)}


class Carrier:
    """Turn z [B, T, K] into the tensor that is sent, and back; both differentiable.

    Attributes:
        dtype: of the tensor that is sent.
        codec: what packs z and its gradient; None for a plain cast.
    """

    def __init__(self, dtype: torch.dtype, codec: Codec | None = None) -> None:
        self.dtype, self.codec = dtype, codec

    def __repr__(self) -> str:
        return f"Carrier({self.dtype}, {self.codec!r})"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that carries z of `shape`."""
        if self.codec is None:
            return shape
        nbytes = self.codec.wire_nbytes(torch.Size(shape).numel(), torch.float32)
        return (-(-nbytes // self.dtype.itemsize),)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that z of `shape` takes, forward or backward."""
        return torch.Size(self.shape(shape)).numel() * self.dtype.itemsize

    def load(self, z: Tensor) -> Tensor:
        """Return what is sent."""
        if self.codec is not None:
            return _Pack.apply(z, self.codec)
        # A copy in any case: torch sends contiguous tensors and detaches them in place, no views.
        return z.to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def unload(self, sent: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return z of `shape` in `dtype`."""
        if self.codec is None:
            return sent.to(dtype)
        return _Unpack.apply(sent, shape, self.codec).to(dtype)


def make_carrier(wire: str | Codec) -> Carrier:
    """Return the carrier of a wire dtype ("bf16", "fp16", "fp32", "fp64", "int8", "int4") or codec.

    Raises:
        ConfigError: an unknown name.
    """
    if not isinstance(wire, str):
        return Carrier(torch.float32, wire)
    if wire in _CODECS:
        return Carrier(torch.float32, _CODECS[wire])
    if wire not in _CASTS:
        known = ", ".join([*_CASTS, *_CODECS])
        raise ConfigError(f"wire must be one of {known}, or a codec, got {wire!r}")
    return Carrier(_CASTS[wire])


def _pack(z: Tensor, codec: Codec) -> Tensor:
    nbytes = codec.wire_nbytes(z.numel(), torch.float32)
    buffer = z.new_zeros(-(-nbytes // 4), dtype=torch.float32)
    codec.encode(z.float(), out=buffer.view(torch.uint8)[:nbytes])
    return buffer


def _unpack(sent: Tensor, shape: torch.Size, codec: Codec) -> Tensor:
    nbytes = codec.wire_nbytes(shape.numel(), torch.float32)
    wire = sent.contiguous().view(torch.uint8)[:nbytes]
    return codec.decode(wire, shape.numel(), torch.float32).view(shape)


class _Pack(torch.autograd.Function):
    """Coefficients to carrier; the gradient arrives as a carrier and leaves as coefficients."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, codec: Codec) -> Tensor:
        ctx.shape, ctx.dtype, ctx.codec = z.shape, z.dtype, codec
        return _pack(z, codec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _unpack(grad, ctx.shape, ctx.codec).to(ctx.dtype), None


class _Unpack(torch.autograd.Function):
    """Carrier to coefficients; their gradient leaves as a carrier."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, shape: tuple[int, ...], codec: Codec) -> Tensor:
        ctx.codec = codec
        return _unpack(sent, torch.Size(shape), codec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _pack(grad, ctx.codec), None, None
