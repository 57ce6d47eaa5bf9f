"""One scale for the whole message: the plain FP8 baseline.

Legend: `N` elements, `W` wire bytes, `R` messages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.protocol import CodecFacts, check_wire, flat_input, wire_out
from thinwire.errors import ConfigError

__all__ = ["Tensorwise"]

# fmt -> wire dtype, largest code
_FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
}
_SCALE_NBYTES = 4
_MIN_SCALE = 1e-30


@dataclass(frozen=True, kw_only=True)
class Tensorwise:
    """Scale a message by its largest magnitude and round to FP8.

    s = max|x| / largest code (at least 1e-30), code = round_to_nearest_even(x / s). Wire: N codes,
    then s as little-endian fp32; N + 4 bytes. NaN or infinity anywhere makes s NaN: the message
    decodes to NaN throughout.

    Attributes:
        fmt: "e4m3" or "e5m2".
    """

    fmt: str = "e4m3"

    def __post_init__(self) -> None:
        if self.fmt not in _FORMATS:
            raise ConfigError(f"fmt must be one of {sorted(_FORMATS)}, got {self.fmt!r}")

    @property
    def facts(self) -> CodecFacts:
        """Return the promises that contract tests check."""
        # Half a unit in the last place of the largest code, and the rounding of x / s.
        return CodecFacts(max_error={"e4m3": 2.0**-4, "e5m2": 2.0**-3}[self.fmt] / 1.75 * 1.001)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact buffer length in bytes; the same for every dtype."""
        return numel + _SCALE_NBYTES

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]."""
        x = flat_input(x, self)
        out = wire_out(out, self.wire_nbytes(x.numel(), x.dtype), x.device)
        dtype, top = _FORMATS[self.fmt]
        values = x.float()
        peak = values.abs().amax() if x.numel() else values.new_zeros(())
        scale = (peak / top).clamp_min(_MIN_SCALE)
        scale = torch.where(peak.isfinite(), scale, torch.nan)
        # Clamped by hand: the cast does not saturate on every build.
        codes = (values / scale).clamp(-top, top).to(dtype)
        out[: x.numel()] = codes.view(torch.uint8)
        out[x.numel() :] = scale.reshape(1).view(torch.uint8)
        return out

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W], or [R, N] from [R, W]."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        codes = rows[:, :numel].contiguous().view(_FORMATS[self.fmt][0])
        values = (codes.float() * self._scales(rows, numel)).to(dtype).view(*wire.shape[:-1], numel)
        return values if out is None else out.copy_(values)

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W] in rank order."""
        total = torch.zeros(numel, dtype=torch.float32, device=wires.device)
        for row in wires:
            total += self.decode(row, numel, torch.float32)
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]."""
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return the number of messages whose scale is NaN."""
        rows = check_wire(wire, self.wire_nbytes(numel, dtype), self)
        return int(self._scales(rows, numel).isnan().sum())

    def _scales(self, rows: Tensor, numel: int) -> Tensor:
        """Return the scales of [R, W] as fp32 [R, 1]."""
        # Cloned, since N bytes in front may leave them unaligned.
        return rows[:, numel:].clone(memory_format=torch.contiguous_format).view(torch.float32)
