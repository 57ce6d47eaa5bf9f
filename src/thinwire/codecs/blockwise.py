"""Blockwise asymmetric integer codec: 2, 4, 6 or 8 bits, a scale and a minimum per block."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs.protocol import CodecFacts, check_wire, flat_input, wire_out
from thinwire.errors import ConfigError
from thinwire.kernels import blockwise as kernel
from thinwire.kernels.blockwise.reference import META_DTYPES, split_wire
from thinwire.kernels.random import RandomKey

__all__ = ["Blockwise"]


@dataclass(frozen=True, kw_only=True)
class Blockwise:
    """Quantize blocks of `block_size` values to `bits` bits between their minimum and maximum.

    Wire bytes are n*bits/8 + 4*n/block_size, n being N rounded up to `pad_to`.

    Attributes:
        bits: payload bits per element: 2, 4, 6 or 8.
        block_size: elements that share a scale and a minimum; a power of two from 32 to 8192.
        layout: "interleaved" (payload and metadata block by block) or "split" (all payload
            first; the fast path). Same size, same values.
        meta: "fp16" or "bf16": type of scale and minimum ("bf16" for |x| > 65504 or tiny ranges).
        pad_to: the message is padded to a multiple of this many elements; None: block_size.
        symmetric: codes around zero and no minimum (an arm for comparisons: 2 bytes less a block).
        rounding: "nearest" (ties to even) or "stochastic" (zero-mean error, twice its square).
        key: where stochastic rounding draws from; equal keys give equal bytes. A new key for each
            step: `dataclasses.replace(codec, key=RandomKey(step=...))`.

    Example:
        >>> codec = Blockwise(bits=6, block_size=32)
        >>> codec.decode(codec.encode(x), x.numel(), x.dtype)

    Reference: Huang et al., "Aquavit", KDD '26, doi 10.1145/3770855.3818083.
    """

    bits: int
    block_size: int = 128
    layout: str = "split"
    meta: str = "fp16"
    pad_to: int | None = None
    symmetric: bool = False
    rounding: str = "nearest"
    key: RandomKey = field(default_factory=RandomKey)

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 6, 8):
            raise ConfigError(f"bits must be 2, 4, 6 or 8, got {self.bits!r}")
        size = self.block_size
        if not 32 <= size <= 8192 or size & (size - 1):
            raise ConfigError(f"block_size must be a power of two from 32 to 8192, got {size!r}")
        if self.layout not in ("interleaved", "split"):
            raise ConfigError(f"layout must be 'interleaved' or 'split', got {self.layout!r}")
        if self.meta not in META_DTYPES:
            raise ConfigError(f"meta must be 'fp16' or 'bf16', got {self.meta!r}")
        if self.pad_to is not None and (self.pad_to <= 0 or self.pad_to % size):
            raise ConfigError(f"pad_to must be a multiple of block_size={size}, got {self.pad_to}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""
        # Half a step (a whole one if stochastic) of the widest block, plus the rounding of scale
        # and minimum to `meta`.
        meta_eps = 2.0**-10 if self.meta == "fp16" else 2.0**-7
        levels = 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1
        steps = 0.5 if self.symmetric else 1.0
        stochastic = self.rounding == "stochastic"
        error = (1 + stochastic) * steps * (1 + 2 * meta_eps) / levels + 2 * meta_eps
        return CodecFacts(max_error=error, unbiased=stochastic, granule=self.block_size)

    @property
    def bits_per_weight(self) -> float:
        """Return payload and metadata bits per element, padding not counted."""
        return self.bits + 8 * kernel.meta_nbytes(self.symmetric) / self.block_size

    def num_blocks(self, numel: int) -> int:
        """Return how many blocks a message of `numel` elements sends."""
        pad_to = self.pad_to or self.block_size
        return -(-numel // pad_to) * (pad_to // self.block_size)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact buffer length in bytes; the same for every dtype."""
        return kernel.wire_nbytes(
            self.num_blocks(numel), self.block_size, self.bits, self.symmetric
        )

    def _shape(self, numel: int) -> tuple[int, int, int, str, str, bool]:
        blocks = self.num_blocks(numel)
        return blocks, self.block_size, self.bits, self.layout, self.meta, self.symmetric

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]."""
        x = flat_input(x, self)
        out = wire_out(out, self.wire_nbytes(x.numel(), x.dtype), x.device)
        stochastic = self.rounding == "stochastic"
        kernel.encode_(x, out, *self._shape(x.numel()), stochastic, *self.key.words)
        return out

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W], or [R, N] from [R, W]."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        if out is None:
            out = torch.empty(*wire.shape[:-1], numel, dtype=dtype, device=wire.device)
        kernel.decode_(rows, out if out.dim() == 2 else out.unsqueeze(0), *self._shape(numel))
        return out

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W] in rank order."""
        rows = check_wire(wires, self.wire_nbytes(numel, dtype), self)
        total = torch.empty(numel, dtype=torch.float32, device=wires.device)
        kernel.sum_(rows, total, *self._shape(numel))
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]."""
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return the number of blocks that decode to NaN."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        return int(split_wire(rows, *self._shape(numel))[2].isnan().sum())
