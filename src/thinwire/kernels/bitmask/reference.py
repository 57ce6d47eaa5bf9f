"""Sets of positions as bits or as 12-bit indices in plain torch: the specification.

Legend: `N` elements, `K` positions (int64, ascending), `C` = ceil(N/4096) chunks, `W` bytes.

    bits     ceil(N/8) bytes; bit j of byte q is element 8q + j
    index12  C counts as u16, then all positions mod 4096, chunk by chunk ascending, as 12-bit
             pairs: i0 & 255, (i0 >> 8) | ((i1 & 15) << 4), i1 >> 4; a last odd one takes 2 bytes
"""

import torch
from torch import Tensor

from thinwire.errors import WireError

__all__ = ["CHUNK", "bits_nbytes", "from_bits", "from_index12", "index12_nbytes", "to_bits"]

CHUNK = 4096


def bits_nbytes(numel: int) -> int:
    """Return the bytes of the bit form."""
    return (numel + 7) // 8


def index12_nbytes(numel: int, k: int) -> int:
    """Return the bytes of the index form."""
    return 2 * (-(-numel // CHUNK)) + (3 * k + 1) // 2


def to_bits(index: Tensor, numel: int) -> Tensor:
    """Return positions [K] as uint8 [W]."""
    mask = torch.zeros(bits_nbytes(numel) * 8, dtype=torch.uint8, device=index.device)
    mask[index] = 1
    weights = 2 ** torch.arange(8, device=index.device)
    return (mask.view(-1, 8) * weights).sum(1).to(torch.uint8)


def from_bits(wire: Tensor, numel: int, k: int) -> Tensor:
    """Return the positions of a bit form; WireError unless exactly k bits are set."""
    bits = (wire[:, None] >> torch.arange(8, device=wire.device)) & 1
    index = bits.view(-1).nonzero().view(-1)
    if index.numel() != k or (k and int(index[-1]) >= numel):
        raise WireError(f"a bit mask of {numel} elements must have {k} set, got {index.numel()}")
    return index


def to_index12(index: Tensor, numel: int) -> Tensor:
    """Return positions [K] as uint8 [W]."""
    counts = torch.bincount(index // CHUNK, minlength=-(-numel // CHUNK))
    head = torch.stack([counts & 255, counts >> 8], 1).view(-1)
    local = torch.nn.functional.pad(index % CHUNK, (0, index.numel() % 2))
    a, b = local[::2], local[1::2]
    body = torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], 1).view(-1)
    body = body[: (3 * index.numel() + 1) // 2]
    return torch.cat([head, body]).to(torch.uint8)


def from_index12(wire: Tensor, numel: int, k: int) -> Tensor:
    """Return the positions of an index form; WireError for what no encoder writes."""
    chunks = -(-numel // CHUNK)
    head = wire[: 2 * chunks].long().view(-1, 2)
    counts = head[:, 0] | (head[:, 1] << 8)
    if int(counts.sum()) != k:
        raise WireError(f"an index mask must hold {k} positions, its counts say {counts.sum()}")
    body = torch.nn.functional.pad(wire[2 * chunks :].long(), (0, k % 2))
    body = body.view(-1, 3)
    local = torch.stack(
        [body[:, 0] | ((body[:, 1] & 15) << 8), (body[:, 1] >> 4) | (body[:, 2] << 4)], 1
    ).view(-1)[:k]
    chunk = torch.repeat_interleave(torch.arange(chunks, device=wire.device), counts)
    index = chunk * CHUNK + local
    if k and (bool((index[1:] <= index[:-1]).any()) or int(index[-1]) >= numel):
        raise WireError("an index mask has positions out of order or beyond the tensor")
    return index
