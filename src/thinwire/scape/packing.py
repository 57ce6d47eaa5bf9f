"""Two wire forms of a sorted set of positions, in plain torch.

bits: ceil(n/8) bytes; bit j of byte q is element 8q + j.
index12: ceil(n/4096) counts as uint16, then all positions mod 4096 as 12-bit pairs,
    i0, i1 -> i0 & 255, (i0 >> 8) | ((i1 & 15) << 4), i1 >> 4; a last odd one takes 2 bytes.

Legend: `K` positions, `N` elements they are drawn from, `C` chunks of 4096, `W` bytes.
"""

import torch
from torch import Tensor

from thinwire.errors import WireError

__all__ = [
    "CHUNK",
    "bits_nbytes",
    "form_of",
    "index12_nbytes",
    "pack_bits",
    "pack_index12",
    "unpack_bits",
    "unpack_index12",
]

CHUNK = 4096


def bits_nbytes(numel: int) -> int:
    """Return the length of the bits form."""
    return -(-numel // 8)


def index12_nbytes(numel: int, k: int) -> int:
    """Return the length of the index12 form of k positions."""
    return 2 * -(-numel // CHUNK) + (3 * k + 1) // 2


def form_of(numel: int, k: int, mask_format: str) -> str:
    """Return "bits" or "index12": the smaller one under "auto" and "delta", bits on a tie."""
    if mask_format in ("bits", "index12"):
        return mask_format
    return "index12" if index12_nbytes(numel, k) < bits_nbytes(numel) else "bits"


def pack_bits(positions_K: Tensor, numel: int) -> Tensor:
    """Return ascending positions as uint8 [W]."""
    bits = torch.zeros(8 * bits_nbytes(numel), dtype=torch.uint8, device=positions_K.device)
    bits[positions_K] = 1
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(wire_W: Tensor, numel: int) -> Tensor:
    """Return the ascending positions, int64 [K].

    Raises:
        WireError: a padding bit is set.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=wire_W.device)
    positions = ((wire_W[:, None] >> shifts) & 1).view(-1).nonzero().view(-1)
    if positions.numel() and int(positions[-1]) >= numel:
        raise WireError(f"a mask of {numel} elements has bit {int(positions[-1])} set")
    return positions


def pack_index12(positions_K: Tensor, numel: int) -> Tensor:
    """Return ascending positions as uint8 [W]."""
    num_chunks = -(-numel // CHUNK)
    counts = torch.bincount(positions_K // CHUNK, minlength=num_chunks)
    head = torch.stack((counts & 255, counts >> 8), dim=1).to(torch.uint8).view(-1)
    local = positions_K % CHUNK
    odd = local.numel() % 2
    if odd:
        local = torch.nn.functional.pad(local, (0, 1))
    i0, i1 = local.view(-1, 2).unbind(1)
    body = torch.stack((i0 & 255, (i0 >> 8) | ((i1 & 15) << 4), i1 >> 4), dim=1)
    body = body.to(torch.uint8).view(-1)
    return torch.cat((head, body[: body.numel() - odd]))


def unpack_index12(wire_W: Tensor, numel: int, k: int) -> Tensor:
    """Return the ascending positions, int64 [K].

    Raises:
        WireError: the counts do not add up to k, or a position lies outside.
    """
    num_chunks = -(-numel // CHUNK)
    head = wire_W[: 2 * num_chunks].view(-1, 2).long()
    counts = head[:, 0] | (head[:, 1] << 8)
    if int(counts.sum()) != k:
        raise WireError(f"a mask of {k} positions counts {int(counts.sum())}")
    body = wire_W[2 * num_chunks :].long()
    body = torch.nn.functional.pad(body, (0, k % 2)).view(-1, 3)
    i0 = body[:, 0] | ((body[:, 1] & 15) << 8)
    i1 = (body[:, 1] >> 4) | (body[:, 2] << 4)
    local = torch.stack((i0, i1), dim=1).view(-1)[:k]
    base = torch.arange(num_chunks, device=wire_W.device) * CHUNK
    positions = torch.repeat_interleave(base, counts) + local
    if k and int(positions[-1]) >= numel:
        raise WireError(f"a mask of {numel} elements names element {int(positions[-1])}")
    return positions
