"""Asymmetric min-max block quantizer in plain torch: the specification of the fused kernels.

Legend: `N` elements, `G` elements per block, `B` blocks (B*G >= N), `R` messages, `W` bytes.

One block holds codes of `bits` bits, a scale s and a minimum z (fp16 or bf16 each):

    z  = meta(min x);  s = meta((max x - z) / (2^bits - 1)), stepped up once where the top code
    would not reach max x;  s = 2^-24 (smallest subnormal of meta) where that is 0
    q  = clip(rint((x - z) / s), 0, 2^bits - 1)          x^ = z + s*q, fp32, then one cast

A block with NaN, infinity, or a minimum or maximum that overflows meta decodes to NaN throughout
(z = NaN, s = 0, codes 0), and so does any block whose top value is not finite. The tail block is
padded with the last valid value.

The symmetric arm has no minimum (2 bytes of metadata; a flagged block has s = NaN):

    top = 2^(bits-1) - 1;  s = meta(max|x| / top), stepped up as above
    q  = clip(rint(x / s), -top, top) + top              x^ = s*(q - top)

Reference: Huang et al., "Aquavit", KDD '26, doi 10.1145/3770855.3818083 (min-max codes with 32
bits of metadata per block); the split of those bits, rounding and packing are thinwire's.
"""

import torch
from torch import Tensor

__all__ = [
    "META_DTYPES",
    "decode",
    "encode",
    "meta_nbytes",
    "pack_codes",
    "split_wire",
    "unpack_codes",
    "wire_nbytes",
]

META_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def meta_nbytes(symmetric: bool) -> int:
    """Return the bytes of metadata per block: a scale, and a minimum unless symmetric."""
    return 2 if symmetric else 4


def wire_nbytes(num_blocks: int, block_size: int, bits: int, symmetric: bool = False) -> int:
    """Return the bytes of `num_blocks` blocks: payload plus metadata."""
    return num_blocks * (block_size * bits // 8 + meta_nbytes(symmetric))


def pad_blocks(x: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Return x [N] as fp32 [B, G], padded with its last value (zeros when x is empty)."""
    missing = num_blocks * block_size - x.numel()
    x = x.float()
    if missing:
        fill = x[-1:] if x.numel() else x.new_zeros(1)
        x = torch.cat([x, fill.expand(missing)])
    return x.view(num_blocks, block_size)


def next_up(s: Tensor) -> Tensor:
    """Return the next larger value of a non-negative fp16 or bf16 tensor."""
    return (s.view(torch.int16) + 1).view(s.dtype)


def block_meta(
    x_BG: Tensor, bits: int, meta: torch.dtype, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale [B], minimum [B] in `meta` and a mask [B] of blocks that cannot be coded."""
    if symmetric:
        top = float(2 ** (bits - 1) - 1)
        hi = x_BG.abs().amax(1)
        z = torch.zeros_like(hi, dtype=meta)
    else:
        top = float(2**bits - 1)
        hi = x_BG.amax(1)
        z = x_BG.amin(1).to(meta) + 0.0  # minus zero is stored as zero
    s = ((hi - z.float()) / top).to(meta)
    s = torch.where(top * s.float() + z.float() < hi, next_up(s), s)
    tiny = torch.ones((), dtype=torch.int16, device=s.device).view(meta)
    s = torch.where(s <= 0, tiny, s)
    finite = torch.isfinite(x_BG).all(1) & torch.isfinite(hi.to(meta))
    bad = ~(finite & torch.isfinite(z) & torch.isfinite(s))
    flag_s, flag_z = (float("nan"), 0.0) if symmetric else (0.0, float("nan"))
    return s.masked_fill(bad, flag_s), z.masked_fill(bad, flag_z), bad


def pack_codes(q_BG: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [B, G] into bytes [B, G*bits/8], element 0 in the lowest bits."""
    if bits == 8:
        return q_BG
    if bits == 6:
        q = q_BG.unflatten(1, (q_BG.shape[1] // 4, 4)).int()
        word = q[..., 0] | (q[..., 1] << 6) | (q[..., 2] << 12) | (q[..., 3] << 18)
        packed = torch.stack([word & 255, (word >> 8) & 255, word >> 16], -1)
    else:
        q = q_BG.unflatten(1, (q_BG.shape[1] * bits // 8, 8 // bits)).int()
        packed = q[..., 0]
        for i in range(1, 8 // bits):
            packed = packed | (q[..., i] << (bits * i))
    return packed.to(torch.uint8).flatten(1)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack_codes`: bytes [..., G*bits/8] to codes uint8 [..., G]."""
    if bits == 8:
        return packed
    if bits == 6:
        p = packed.unflatten(-1, (packed.shape[-1] // 3, 3)).int()
        word = p[..., 0] | (p[..., 1] << 8) | (p[..., 2] << 16)
        q = torch.stack([(word >> (6 * i)) & 63 for i in range(4)], -1)
    else:
        p = packed.unsqueeze(-1).int()
        q = torch.cat([(p >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], -1)
    return q.to(torch.uint8).flatten(-2)


def encode(
    x: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
    u: Tensor | None,
) -> Tensor:
    """Return x [N] as uint8 [W].

    Args:
        x: values [N], fp32, bf16 or fp16.
        num_blocks: blocks to send, at least ceil(N / block_size); the rest is padding.
        block_size: elements per block, a multiple of 8, at least 32.
        bits: 2, 4, 6 or 8.
        layout: "interleaved" (payload, s, z per block) or "split" (all payload, then s, z pairs).
        meta: "fp16" or "bf16", the type of scale and minimum.
        symmetric: codes around zero, without a minimum.
        u: None to round to nearest even, or uniforms in [0, 1) [B*G] for stochastic rounding.
    """
    x_BG = pad_blocks(x, num_blocks, block_size)
    s, z, bad = block_meta(x_BG, bits, META_DTYPES[meta], symmetric)
    half = 2 ** (bits - 1) - 1 if symmetric else 0
    top = 2 * half if symmetric else 2**bits - 1
    y = (x_BG - z.float()[:, None]) / s.float()[:, None]
    y = torch.round(y) if u is None else torch.floor(y + u.view_as(y))
    q = (y.clamp(-half, top - half) + half).masked_fill(bad[:, None], 0).to(torch.uint8)
    payload = pack_codes(q, bits)
    tail = (s[:, None] if symmetric else torch.stack([s, z], 1)).contiguous()
    tail = tail.view(torch.uint8).view(num_blocks, meta_nbytes(symmetric))
    if layout == "interleaved":
        return torch.cat([payload, tail], 1).view(-1)
    return torch.cat([payload.reshape(-1), tail.reshape(-1)])


def split_wire(
    wires: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return payload [R, B, G*bits/8] and fp32 scale and minimum [R, B] of buffers [R, W].

    A block whose top value is not finite comes back as s = 0, z = NaN.
    """
    num, width, extra = wires.shape[0], block_size * bits // 8, meta_nbytes(symmetric)
    if layout == "interleaved":
        blocks = wires.reshape(num, num_blocks, width + extra)
        payload, tail = blocks[..., :width], blocks[..., width:]
    else:
        payload = wires[:, : num_blocks * width].reshape(num, num_blocks, width)
        tail = wires[:, num_blocks * width :].reshape(num, num_blocks, extra)
    # A new tensor, so that the 16-bit view is aligned wherever the message starts.
    sz = tail.clone(memory_format=torch.contiguous_format).view(META_DTYPES[meta]).float()
    s = sz[..., 0]
    z = torch.zeros_like(s) if symmetric else sz[..., 1]
    top = 2**bits - 2 if symmetric else 2**bits - 1
    flagged = ~torch.isfinite(z + s * top)
    return payload, s.masked_fill(flagged, 0.0), z.masked_fill(flagged, float("nan"))


def decode(
    wires: Tensor,
    out: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
) -> None:
    """Write buffers [R, W] into out [R, N] (the padding is dropped)."""
    payload, s, z = split_wire(wires, num_blocks, block_size, bits, layout, meta, symmetric)
    half = 2 ** (bits - 1) - 1 if symmetric else 0
    q = unpack_codes(payload.contiguous(), bits).float() - half
    x = z[..., None] + s[..., None] * q
    out.copy_(x.flatten(1)[:, : out.shape[1]])
