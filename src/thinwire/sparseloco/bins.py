"""The older value quantizer with 16 or 256 levels per tensor, kept as an arm of studies.

It is the authors' formula of 4 levels ("paper" in `kernels.topk`) with more bins, over the same
choice of entries. Layout: mu and the table in fp32, the 12-bit indices, then codes of 4 bits (first
in the low half) or 8 bits for all entries of the tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.protocol import CodecFacts, check_wire, wire_out
from thinwire.codecs.topk import TopK
from thinwire.errors import ConfigError

__all__ = ["Bins"]


@dataclass(frozen=True)
class Bins:
    """Top-k entries whose values take one of `n_bins` levels per tensor.

    With v the kept values, c = v - mean(v), step = 6*std(v)/n_bins (1 where that is 0 or not
    finite): code = clip(rint(c/step + n_bins/2), 0, n_bins - 1); level = mean of c of that code.

    Attributes:
        topk: chooses the entries; its quant is "none".
        n_bins: 4, 16 or 256.

    Reference: Sarfi et al., "SparseLoCo", arXiv 2508.15706 (8 bits, later 4, in production use).
    """

    topk: TopK
    n_bins: int

    def __post_init__(self) -> None:
        if self.n_bins not in (4, 16, 256) or self.topk.quant != "none":
            raise ConfigError(f"n_bins must be 16 or 256, got {self.n_bins!r}")

    @property
    def facts(self) -> CodecFacts:
        """Return the promises of this codec."""
        return CodecFacts(max_error=None)

    @property
    def _packed(self) -> bool:
        return self.n_bins <= 16

    def _sizes(self, numel: int) -> tuple[int, int, int]:
        """Return entries, and bytes of the indices and of the codes."""
        geo = self.topk.geometry(numel)
        count = geo.entries
        return count, geo.index_nbytes, -(-count // 2) if self._packed else count

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact buffer length in bytes, a multiple of 4."""
        count, index_nbytes, code_nbytes = self._sizes(numel)
        head = 4 * (1 + self.n_bins) if count else 0
        return -(-(head + index_nbytes + code_nbytes) // 4) * 4

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x as uint8 [W]."""
        out = wire_out(out, self.wire_nbytes(x.numel(), x.dtype), x.device)
        out.zero_()
        count, index_nbytes, code_nbytes = self._sizes(x.numel())
        if count == 0:
            return out
        plain = self.topk.encode(x)
        _, v = self.topk.entries(plain, x.numel())
        mu, codes, table = self._quantize(v)
        head = torch.cat([mu.view(1), table])
        at = 4 * head.numel()
        out[:at] = head.view(torch.uint8)
        out[at : at + index_nbytes] = plain[:index_nbytes]
        out[at + index_nbytes : at + index_nbytes + code_nbytes] = self._pack(codes)
        return out

    def decode(
        self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return [N] from [W]."""
        dense = torch.zeros(numel, dtype=dtype, device=wire.device) if out is None else out.zero_()
        position, value = self.entries(wire, numel)
        dense[position] = value.to(dtype)
        return dense

    def decode_sum(self, wires: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the fp32 sum [N] of R buffers [R, W] in rank order."""
        total = torch.zeros(numel, device=wires.device)
        for wire in wires:
            position, value = self.entries(wire, numel)
            total[position] += value
        return total

    def decode_sum_encode(
        self, wires: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the message [W] of the sum of R buffers [R, W]."""
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return 1 where the levels of a message are not finite, as after NaN or infinity."""
        rows = wire.view(-1, wire.shape[-1])
        at = 4 * (1 + self.n_bins) if self.topk.geometry(numel).entries else 0
        heads = rows[:, :at].clone().view(torch.float32)
        return int((~torch.isfinite(heads).all(1)).sum())

    def entries(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return what one message [W] holds: flat positions int64 [K] and fp32 values [K].

        Raises:
            WireError: indices that no encoder writes.
        """
        check_wire(wire, self.wire_nbytes(numel, torch.float32), self)
        count, index_nbytes, code_nbytes = self._sizes(numel)
        plain = wire.new_zeros(self.topk.wire_nbytes(numel, torch.float32))
        at = 4 * (1 + self.n_bins) if count else 0
        plain[:index_nbytes] = wire[at : at + index_nbytes]
        position, _ = self.topk.entries(plain, numel)
        if count == 0:
            return position, torch.zeros(0, device=wire.device)
        head = wire[:at].clone().view(torch.float32)
        codes = wire[at + index_nbytes : at + index_nbytes + code_nbytes].long()
        if self._packed:
            codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:count]
        return position, head[0] + head[1:][codes.clamp_max(self.n_bins - 1)]

    def _quantize(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mu, codes int64 [K] and the table fp32 [n_bins]."""
        mu = (v.double().cumsum(0)[-1] / v.numel()).float()
        c = v - mu
        sigma = c.double().std().float() if v.numel() > 1 else torch.zeros_like(mu)
        step = (6 * sigma) / self.n_bins
        step = torch.where(torch.isfinite(step) & (step > 0), step, 1.0)
        codes = torch.round(c / step + self.n_bins // 2).clamp(0, self.n_bins - 1)
        codes = torch.nan_to_num(codes).long()
        sums = torch.bincount(codes, weights=c.double(), minlength=self.n_bins)
        counts = torch.bincount(codes, minlength=self.n_bins)
        table = torch.where(counts > 0, sums / counts.clamp_min(1), 0.0).float()
        return mu, codes, table

    def _pack(self, codes: Tensor) -> Tensor:
        if not self._packed:
            return codes.to(torch.uint8)
        pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
        return (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8)
