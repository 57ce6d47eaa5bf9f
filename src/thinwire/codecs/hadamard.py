"""TACO's codec: groups scaled, rotated by a Walsh-Hadamard transform, scaled and cast to 8 bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.protocol import CodecFacts, check_wire, flat_input, wire_out
from thinwire.errors import ConfigError
from thinwire.kernels import hadamard as kernel
from thinwire.kernels.hadamard.reference import scales

__all__ = ["Hadamard"]

_GROUPS = (32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class Hadamard:
    """Scale groups by their root mean square, rotate them, scale to the format and round.

    Wire bytes are n*(b + 4f/group), n being N rounded up to whole groups, b the bytes per code
    and f the fp32 scales per group: 2, or 1 with `merge_scales` or without `alpha`.

    Attributes:
        fmt: "e4m3", "e5m2", "int8" or "int4".
        group: elements that share scales: 32, 64, 128, 256 or 512.
        hadamard: rotate; False leaves plain group scaling.
        alpha: scale by the root mean square before the rotation (an underflow guard below 1e-12);
            None: as published for FP8, off for INT.
        merge_scales: send one scale s/alpha in place of two.
        nonfinite: what a group with NaN or infinity becomes. "raise" and "propagate": NaN on the
            wire (the collective raises, or not); "zero": zeros. Always counted.
        middle: how `decode_sum_encode` adds: "fp32", "cast" (addends and sum rounded to the
            tensor's dtype) or "rotated" (without a transform).
        target: None, or another scaling target than the largest code (documents old settings).

    Reference: Liu et al., "TACO", HPDC '26, arXiv 2604.24088.
    """

    fmt: str = "e4m3"
    group: int = 128
    hadamard: bool = True
    alpha: bool | None = None
    merge_scales: bool = False
    nonfinite: str = "raise"
    middle: str = "fp32"
    target: float | None = None

    def __post_init__(self) -> None:
        if self.fmt not in kernel.FORMATS:
            raise ConfigError(f"fmt must be one of {sorted(kernel.FORMATS)}, got {self.fmt!r}")
        if self.group not in _GROUPS:
            raise ConfigError(f"group must be one of {_GROUPS}, got {self.group!r}")
        if self.nonfinite not in ("raise", "zero", "propagate"):
            raise ConfigError(
                f"nonfinite must be 'raise', 'zero' or 'propagate', got {self.nonfinite!r}"
            )
        if self.middle not in ("fp32", "cast", "rotated"):
            raise ConfigError(f"middle must be 'fp32', 'cast' or 'rotated', got {self.middle!r}")
        if self.target is not None and not 0 < self.target < float("inf"):
            raise ConfigError(f"target must be positive and finite, got {self.target!r}")

    @property
    def layout(self) -> kernel.Layout:
        """Return the options that kernels take."""
        alpha = not self.fmt.startswith("int") if self.alpha is None else self.alpha
        return kernel.Layout(
            self.fmt,
            self.group,
            self.hadamard,
            alpha,
            self.merge_scales,
            self.nonfinite == "zero",
            self.target or kernel.FORMATS[self.fmt],
        )

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""
        # Half a unit in the last place of the largest code, spread by the rotation over a group.
        unit = {"e4m3": 16 / 448, "e5m2": 4096 / 57344, "int8": 0.5 / 127, "int4": 0.5 / 7}
        # In the rotated domain the largest entry is at most sqrt(group) times max|x|, and the
        # error of one output at most sqrt(group) times the largest error there.
        spread = float(self.group) if self.hadamard else 1.0
        fits = self.target in (None, kernel.FORMATS[self.fmt])
        max_error = unit[self.fmt] * spread * 1.001 if fits else None
        return CodecFacts(max_error=max_error, granule=self.group)

    def num_groups(self, numel: int) -> int:
        """Return how many groups a message of `numel` elements sends."""
        return -(-numel // self.group)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact buffer length in bytes; the same for every dtype."""
        return self.layout.wire_nbytes(self.num_groups(numel))

    def _args(self, numel: int) -> tuple[int, str, int, bool, bool, bool, bool, float]:
        lay = self.layout
        return (
            self.num_groups(numel),
            lay.fmt,
            lay.group,
            lay.hadamard,
            lay.alpha,
            lay.merge,
            lay.zero,
            lay.target,
        )

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]."""
        x = flat_input(x, self)
        out = wire_out(out, self.wire_nbytes(x.numel(), x.dtype), x.device)
        kernel.encode_(x, out, *self._args(x.numel()))
        return out

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W], or [R, N] from [R, W]."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        if out is None:
            out = torch.empty(*wire.shape[:-1], numel, dtype=dtype, device=wire.device)
        kernel.decode_(rows, out if out.dim() == 2 else out.unsqueeze(0), *self._args(numel))
        return out

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W] in rank order."""
        rows = check_wire(wires, self.wire_nbytes(numel, dtype), self)
        total = torch.empty(numel, dtype=torch.float32, device=wires.device)
        kernel.decode_sum_(rows, total, *self._args(numel))
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]: a two-shot's middle, fused."""
        nbytes = self.wire_nbytes(numel, dtype)
        rows = check_wire(wires, nbytes, self)
        out = wire_out(out, nbytes, wires.device)
        kernel.decode_sum_encode_(rows, out, *self._args(numel), self.middle, dtype)
        return out

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return the number of groups that hold no values: NaN throughout, or zeroed."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        return int(scales(rows, self.num_groups(numel), self.layout)[2].sum())
