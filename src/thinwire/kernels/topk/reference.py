"""Chunked top-k with 12-bit indices and 2-bit values in plain torch: the specification.

Legend: `C` chunks, `P` cells of a chunk (tile^2 at most), `K` entries of the largest chunk.

Per chunk the k entries of largest |x| are kept, ties to the lower index, sent by ascending index.

    sym    per chunk: a = |v|; thr = mean(a); 3 times: hi, lo = means of a above and not above thr
           (0 if empty), thr = (lo + hi)/2; code = (v < 0) + 2*(a > thr); lo, hi as 16-bit floats
    paper  per tensor: mu = mean(v), c = v - mu, step = 6*std(c)/4 (1 where 0 or not finite);
           code = clip(rint(c/step + 2), 0, 3); table[j] = mean of c with code j (0 if empty)
    none   fp32 values

Means add in fp64, by ascending index, and round once to fp32. Wire: sym [lo hi per chunk][indices]
[codes]; paper [mu table][indices][codes]; none [indices][values]; zero-padded to 4 bytes. A chunk
with NaN or infinity (or a level outside its 16-bit type) sends its first k cells as NaN.

Reference: Sarfi et al., "SparseLoCo", arXiv 2508.15706; `paper` is the authors' quantizer.
"""

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels.rounding import sqrt
from thinwire.kernels.topk.geometry import Geometry

__all__ = ["LEVELS", "decode", "encode", "entries", "feedback", "wire_nbytes"]

LEVELS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def head_nbytes(geo: Geometry, quant: str) -> int:
    """Return the bytes before the indices."""
    return {"sym": 4 * geo.chunks, "paper": 20 if geo.chunks else 0, "none": 0}[quant]


def wire_nbytes(geo: Geometry, quant: str) -> int:
    """Return the bytes of a message, a multiple of 4."""
    values = 4 * geo.entries if quant == "none" else geo.code_nbytes
    return -(-(head_nbytes(geo, quant) + geo.index_nbytes + values) // 4) * 4


def _cells(geo: Geometry, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return flat positions, wire indices and a mask of valid cells, int64 and bool [C, P]."""
    height, width, base = (
        torch.from_numpy(a).to(device)[:, None] for a in (geo.height, geo.width, geo.base)
    )
    cells = int((geo.height * geo.width).max()) if geo.chunks else 0
    p = torch.arange(cells, device=device)[None]
    row, column = p // width, p % width
    return base + row * geo.pitch + column, row * geo.tile_width + column, p < height * width


def _select(x: Tensor, geo: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return values, wire indices, flat positions, a mask [C, K], and flagged chunks [C]."""
    position, index, valid = _cells(geo, x.device)
    x_CP = x[position.clamp_max(x.numel() - 1)]
    flagged = ~(torch.isfinite(x_CP) | ~valid).all(1)
    magnitude = torch.where(valid, x_CP.abs(), -1.0).masked_fill(flagged[:, None] & valid, 0.0)
    k = torch.from_numpy(geo.k).to(x.device)[:, None]
    most = int(geo.k.max())
    order = torch.sort(magnitude, dim=1, descending=True, stable=True).indices[:, :most]
    kept = torch.arange(most, device=x.device)[None] < k
    order = torch.where(kept, order, x_CP.shape[1]).sort(1).values
    order = torch.where(kept, order, 0)
    values = x_CP.gather(1, order).masked_fill(~kept, 0.0)
    return values, index.gather(1, order), position.gather(1, order), kept, flagged


def _total(x: Tensor) -> Tensor:
    """Return sums over the last dimension in fp64, added in order."""
    return x.double().cumsum(-1)[..., -1]


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum(-1)
    mean = _total(torch.where(mask, x, 0.0)) / count.clamp_min(1)
    return torch.where(count > 0, mean, 0.0).float()


def _sym(v: Tensor, kept: Tensor, level: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [C, K], levels [C, 2] and chunks whose levels overflow [C]."""
    a = v.abs()
    thr = _mean(a, kept)
    lo = hi = thr
    for _ in range(3):
        above = a > thr[:, None]
        hi, lo = _mean(a, kept & above), _mean(a, kept & ~above)
        thr = (lo + hi) * 0.5
    codes = (v < 0).int() + 2 * (a > thr[:, None]).int()
    levels = torch.stack([lo, hi], 1).to(level)
    return codes, levels, ~torch.isfinite(levels).all(1)


def _paper(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [K] and [mu, table] fp32 [5] of all kept values [K]."""
    every = torch.ones_like(v, dtype=torch.bool)
    mu = _mean(v, every)
    c = v - mu
    if v.numel() > 1:
        spread = c.double() - _total(c) / v.numel()
        sigma = sqrt(_total(spread * spread) / (v.numel() - 1)).float()
    else:
        sigma = torch.zeros_like(mu)
    step = (6 * sigma) / 4
    step = torch.where(torch.isfinite(step) & (step > 0), step, 1.0)
    codes = torch.round(c / step + 2).clamp(0, 3)
    table = torch.stack([_mean(c, codes == j) for j in range(4)])
    codes = torch.nan_to_num(codes).int()
    return codes, torch.cat([mu.view(1), table])


def _pack_indices(index: Tensor, kept: Tensor) -> Tensor:
    even = index.shape[1] % 2
    i = torch.nn.functional.pad(torch.where(kept, index, 0), (0, even)).int()
    first, second = i[:, ::2], i[:, 1::2]
    packed = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], 2)
    nbytes = (3 * kept.sum(1, keepdim=True) + 1) // 2
    packed = packed.flatten(1)
    used = torch.arange(packed.shape[1], device=index.device)[None] < nbytes
    return packed[used].to(torch.uint8)


def _pack_codes(codes: Tensor, kept: Tensor) -> Tensor:
    c = torch.nn.functional.pad(torch.where(kept, codes, 0), (0, -codes.shape[1] % 4))
    c = c.view(c.shape[0], -1, 4)
    packed = c[..., 0] | (c[..., 1] << 2) | (c[..., 2] << 4) | (c[..., 3] << 6)
    used = (
        torch.arange(packed.shape[1], device=c.device)[None] < (kept.sum(1, keepdim=True) + 3) // 4
    )
    return packed[used].to(torch.uint8)


def encode(x: Tensor, geo: Geometry, quant: str, level: str) -> Tensor:
    """Return x [N] (fp32, bf16 or fp16) as uint8 [W]."""
    if geo.entries == 0:
        return torch.zeros(0, dtype=torch.uint8, device=x.device)
    v, index, _, kept, flagged = _select(x.float(), geo)
    v = v.masked_fill(flagged[:, None] & kept, float("nan"))
    parts = [_pack_indices(index, kept)]
    if quant == "sym":
        codes, levels, overflow = _sym(v, kept, LEVELS[level])
        bad = flagged | overflow
        codes = codes.masked_fill(bad[:, None], 0)
        levels = levels.masked_fill(bad[:, None], float("nan"))
        parts = [levels.view(torch.uint8).view(-1), *parts, _pack_codes(codes, kept)]
    elif quant == "paper":
        flat_codes, table = _paper(v[kept])
        codes = torch.zeros_like(index, dtype=torch.int32)
        codes[kept] = flat_codes
        parts = [table.view(torch.uint8), *parts, _pack_codes(codes, kept)]
    else:
        parts.append(v[kept].view(torch.uint8))
    wire = torch.cat(parts)
    return torch.nn.functional.pad(wire, (0, wire_nbytes(geo, quant) - wire.numel()))


def _ragged(section: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes int32 [C, most] of a section whose chunks take `counts` bytes, and the mask."""
    most = int(counts.max())
    used = torch.arange(most, device=section.device)[None] < counts[:, None]
    out = torch.zeros(used.shape, dtype=torch.int32, device=section.device)
    out[used] = section.int()
    return out, used


def entries(wire: Tensor, geo: Geometry, quant: str, level: str) -> tuple[Tensor, Tensor]:
    """Return flat positions int64 [K] and fp32 values [K] of a message.

    Raises:
        WireError: indices that do not ascend or lie outside their chunk's valid cells.
    """
    device = wire.device
    k = torch.from_numpy(geo.k).to(device)
    kept = torch.arange(int(geo.k.max()), device=device)[None] < k[:, None]
    begin = head_nbytes(geo, quant)
    end = begin + geo.index_nbytes
    raw, _ = _ragged(wire[begin:end], (3 * k + 1) // 2)
    raw = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 3)).view(geo.chunks, -1, 3)
    first = raw[..., 0] | ((raw[..., 1] & 15) << 8)
    second = (raw[..., 1] >> 4) | (raw[..., 2] << 4)
    index = torch.stack([first, second], 2).flatten(1)[:, : kept.shape[1]].long()
    width, height, base = (
        torch.from_numpy(a).to(device)[:, None] for a in (geo.width, geo.height, geo.base)
    )
    row, column = index // geo.tile_width, index % geo.tile_width
    good = (row < height) & (column < width)
    good[:, 1:] &= index[:, 1:] > index[:, :-1]
    if not bool((good | ~kept).all()):
        raise WireError("a top-k message has indices out of order or outside their chunk")
    position = (base + row * geo.pitch + column)[kept]
    if quant == "none":
        data = wire[end : end + 4 * geo.entries].clone()
        return position, data.view(torch.float32)
    packed, _ = _ragged(wire[end : end + geo.code_nbytes], (k + 3) // 4)
    codes = torch.stack([(packed >> (2 * i)) & 3 for i in range(4)], 2).flatten(1)
    codes = codes[:, : kept.shape[1]][kept].long()
    if quant == "paper":
        head = wire[:20].clone().view(torch.float32)
        return position, head[0] + head[1:][codes]
    levels = wire[:begin].clone().view(LEVELS[level]).float().view(-1, 2)
    chunk = torch.arange(geo.chunks, device=device)[:, None].expand_as(kept)[kept]
    value = levels[chunk, codes >> 1]
    return position, torch.where((codes & 1) == 1, -value, value)


def decode(wires: Tensor, out: Tensor, geo: Geometry, quant: str, level: str) -> None:
    """Write buffers [R, W] into out [R, N]."""
    out.zero_()
    for wire, row in zip(wires, out, strict=True):
        if geo.entries:
            position, value = entries(wire, geo, quant, level)
            row[position] = value.to(out.dtype)


def feedback(
    delta: Tensor, residual: Tensor, beta: float, geo: Geometry, quant: str, level: str
) -> tuple[Tensor, Tensor]:
    """Return the message of a = beta*residual + delta and the new residual a - decode(message)."""
    a = beta * residual + delta.float()
    wire = encode(a, geo, quant, level)
    sent = torch.empty(1, a.numel(), device=a.device)
    decode(wire[None], sent, geo, quant, level)
    return wire, a - sent[0]
