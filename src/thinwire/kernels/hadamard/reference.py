"""Scaled and rotated 8- or 4-bit groups in plain torch: the specification of the fused kernels.

Legend: `N` elements, `G` elements per group, `B` groups (B*G >= N, zero-padded), `R` messages.

    alpha = clip(T / sqrt(mean(x^2) + 1e-6), 1e-3, 1e3)       (1 where the format sends no alpha)
    y = H (alpha*x) / sqrt(G)          natural-order Walsh-Hadamard, strides 1, 2, 4, ...
    s = clip(max(max|y|, 1e-12) / T, 1e-12, 1e6)              INT: clip from 1e-30 to 1e30
    q = cast(clip(y / s, -limit, limit))                      ties to even
    x^ = (H (s*q) / sqrt(G)) / alpha

T = limit = 448 (E4M3), 57344 (E5M2), 127 (INT8), 7 (INT4). `merge` sends r = s/alpha alone.
Sums of squares add halves (i and i + G/2, then quarters, ...), so that every device agrees.

A group that holds NaN or infinity has codes 0 and s = NaN, which decodes to NaN throughout; under
`zero` it decodes to zeros: s = 1e-12 and alpha = 1e-3, or, in formats with one scale, s = -1e-12.
A scale that no encoder writes, or a non-finite FP8 code, marks the group likewise (NaN).

Reference: Liu et al., "TACO", arXiv 2604.24088 (groups, alpha, rotation, FP8 and its constants).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.rounding import sqrt

__all__ = ["FORMATS", "Layout", "decode", "decode_sum_encode", "encode", "scales", "transform"]

FORMATS = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LAMBDA = 1e-6
TINY = 1e-12
S_RANGE = {"fp8": (1e-12, 1e6), "int": (1e-30, 1e30)}
ALPHA_RANGE = (1e-3, 1e3)


@dataclass(frozen=True, slots=True)
class Layout:
    """How groups are coded: format, target T, group size and which scales travel."""

    fmt: str
    group: int
    hadamard: bool
    alpha: bool
    merge: bool
    zero: bool
    target: float

    @property
    def code_bytes(self) -> int:
        """Return the payload bytes of one group."""
        return self.group // 2 if self.fmt == "int4" else self.group

    @property
    def fields(self) -> int:
        """Return how many fp32 scales a group sends."""
        return 2 if self.alpha and not self.merge else 1

    @property
    def s_range(self) -> tuple[float, float]:
        """Return the scales that an encoder writes into the first field."""
        low, high = S_RANGE["int" if self.fmt.startswith("int") else "fp8"]
        if self.alpha and self.merge:
            return low / ALPHA_RANGE[1], high / ALPHA_RANGE[0]
        return low, high

    def wire_nbytes(self, groups: int) -> int:
        """Return the bytes of a message."""
        return groups * (self.code_bytes + 4 * self.fields)


def transform(x_BG: Tensor) -> Tensor:
    """Return H x of each row, without the factor 1/sqrt(G)."""
    num, size = x_BG.shape
    h = 1
    while h < size:
        pairs = x_BG.view(num, size // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x_BG = torch.stack([a + b, a - b], 2).view(num, size)
        h *= 2
    return x_BG


def _mean_square(x_BG: Tensor) -> Tensor:
    total = x_BG * x_BG
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0] * (1.0 / x_BG.shape[1])


def inverse_root(size: int) -> float:
    """Return 1/sqrt(G) as the fp32 factor of every transform."""
    return float(torch.tensor(size**-0.5, dtype=torch.float32))


def _round(y: Tensor, fmt: str) -> Tensor:
    """Return codes uint8 [B, G] (INT4 unpacked) of y, which lies within the format's limits."""
    if fmt in _FP8:
        return y.to(_FP8[fmt]).view(torch.uint8)
    q = torch.round(y)
    return (q + 8).to(torch.uint8) if fmt == "int4" else q.to(torch.int8).view(torch.uint8)


def _group_scale(x_BG: Tensor, layout: Layout) -> Tensor:
    if not layout.alpha:
        return torch.ones_like(x_BG[:, 0])
    m = (_mean_square(x_BG) + LAMBDA).clamp_min(TINY)
    # A 0-d tensor: torch would turn number / tensor into a reciprocal and a product.
    return (m.new_tensor(layout.target) / sqrt(m)).clamp(*ALPHA_RANGE)


def encode_groups(x_BG: Tensor, layout: Layout, *, rotated: bool = False) -> Tensor:
    """Return uint8 [W] of fp32 groups, which are rotated already if `rotated` is set."""
    limit = FORMATS[layout.fmt]
    low, high = S_RANGE["int" if layout.fmt.startswith("int") else "fp8"]
    finite = torch.isfinite(x_BG).all(1)
    alpha = _group_scale(x_BG, layout)
    y = x_BG * alpha[:, None]
    if layout.hadamard and not rotated:
        y = transform(y) * inverse_root(layout.group)
    absmax = y.abs().amax(1)
    s = (absmax.clamp_min(low) / layout.target).clamp(low, None)
    if layout.fmt in _FP8:
        s = s.clamp_max(high)
    bad = ~(finite & torch.isfinite(absmax) & (s <= high))
    q = _round((y / s[:, None]).clamp(-limit, limit).masked_fill(bad[:, None], 0.0), layout.fmt)
    if layout.fmt == "int4":
        q = q[:, ::2] | (q[:, 1::2] << 4)
    return torch.cat([q.reshape(-1), _fields(s, alpha, bad, layout).view(torch.uint8)])


def _fields(s: Tensor, alpha: Tensor, bad: Tensor, layout: Layout) -> Tensor:
    """Return the fp32 scales as they travel, flags included."""
    if layout.fields == 2:
        s = s.masked_fill(bad, TINY if layout.zero else float("nan"))
        return torch.cat([s, alpha.masked_fill(bad, ALPHA_RANGE[0])])
    s = s / alpha if layout.alpha else s
    return s.masked_fill(bad, -TINY if layout.zero else float("nan"))


def encode(x: Tensor, groups: int, layout: Layout) -> Tensor:
    """Return x [N] (fp32, bf16 or fp16) as uint8 [W], zero-padded to `groups` groups."""
    x_BG = torch.nn.functional.pad(x.float(), (0, groups * layout.group - x.numel()))
    return encode_groups(x_BG.view(groups, layout.group), layout)


def scales(wires: Tensor, groups: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Return s and alpha fp32 [R, B] and a mask of flagged groups (s = NaN unless zeroed).

    A flagged group has s = NaN and alpha = 1, a zeroed one s = 0 and alpha = 1.
    """
    tail = wires[:, groups * layout.code_bytes :]
    fields = tail.clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
    fields = fields.view(wires.shape[0], layout.fields, groups)
    s = fields[:, 0]
    alpha = fields[:, 1] if layout.fields == 2 else torch.ones_like(s)
    low, high = layout.s_range
    valid = (s >= _f32(low)) & (s <= _f32(high))
    if layout.fields == 2:
        valid &= (alpha >= _f32(ALPHA_RANGE[0])) & (alpha <= _f32(ALPHA_RANGE[1]))
        zeroed = (s == _f32(TINY)) & (alpha == _f32(ALPHA_RANGE[0]))
    else:
        zeroed = s == _f32(-TINY)
    flagged = ~valid & ~zeroed
    alpha = alpha.masked_fill(flagged | zeroed, 1.0)
    s = s.masked_fill(flagged, float("nan")).masked_fill(zeroed, 0.0)
    return s, alpha, flagged | zeroed


def _f32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def values(wires: Tensor, groups: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return s*q in the rotated domain, fp32 [R, B, G], and alpha [R, B]."""
    payload = wires[:, : groups * layout.code_bytes]
    payload = payload.reshape(wires.shape[0], groups, layout.code_bytes)
    if layout.fmt in _FP8:
        q = payload.contiguous().view(_FP8[layout.fmt]).float()
    elif layout.fmt == "int8":
        q = payload.contiguous().view(torch.int8).float()
    else:
        q = torch.stack([payload & 15, payload >> 4], -1).flatten(2).float() - 8
    s, alpha, _ = scales(wires, groups, layout)
    s = torch.where(torch.isfinite(q).all(2), s, float("nan"))
    # The mask keeps a code that is not finite from leaking through a zeroed group.
    return torch.where(torch.isfinite(q), q, 0.0) * s[..., None], alpha


def decode_groups(wires: Tensor, groups: int, layout: Layout) -> Tensor:
    """Return fp32 [R, B, G]."""
    y, alpha = values(wires, groups, layout)
    if layout.hadamard:
        y = transform(y.flatten(0, 1)).view_as(y) * inverse_root(layout.group)
    return y / alpha[..., None] if layout.fields == 2 else y


def decode(wires: Tensor, out: Tensor, groups: int, layout: Layout) -> None:
    """Write buffers [R, W] into out [R, N] (the padding is dropped)."""
    out.copy_(decode_groups(wires, groups, layout).flatten(1)[:, : out.shape[1]])


def decode_sum_encode(
    wires: Tensor, groups: int, layout: Layout, middle: str, dtype: torch.dtype
) -> Tensor:
    """Return the message of the sum, in rank order, of messages [R, W].

    Args:
        wires: messages [R, W], R >= 1.
        groups: groups per message.
        layout: how they are coded, and how the sum will be.
        middle: "fp32" (no rounding between decode and encode), "cast" (addends and sum rounded to
            `dtype`) or "rotated" (added in the rotated domain: no transform at all).
        dtype: the tensor's dtype.
    """
    if middle == "rotated" and layout.hadamard:
        y, alpha = values(wires, groups, layout)
        parts = y / alpha[..., None] if layout.fields == 2 else y
    else:
        parts = decode_groups(wires, groups, layout)
    total = _cast(parts[0], middle, dtype)
    for part in parts[1:]:
        total = total + _cast(part, middle, dtype)
    rotated = middle == "rotated"
    return encode_groups(_cast(total, middle, dtype), layout, rotated=rotated)


def _cast(x: Tensor, middle: str, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float() if middle == "cast" else x
