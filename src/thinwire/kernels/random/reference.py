"""Philox-4x32-10 in plain torch: random numbers from (run key, tensor, step, index) alone.

    key = 64-bit run key;  counter = (block low, block high, step, tensor);  block = index // 4
    u[index] = (word[index mod 4] >> 8) * 2^-24,  uniform in [0, 1)

The same draw comes out on every device, for every sharding and order of calls.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC '11.
"""

import torch
from torch import Tensor

__all__ = ["philox", "uniform"]

_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low words of a 32-bit by 32-bit product, in int64 without overflow."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counters: tuple[Tensor, ...], key: int) -> Tensor:
    """Return words int64 [N, 4] in [0, 2^32) for four counter words int64 [N]."""
    c0, c1, c2, c3 = counters
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_MUL[0], c0)
        hi1, lo1 = _mul_hi_lo(_MUL[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack([c0, c1, c2, c3], -1)


def uniform(index: Tensor, key: int, tensor: int, step: int) -> Tensor:
    """Return fp32 uniforms in [0, 1), one for each flat index (int64, any shape)."""
    flat = index.reshape(-1)
    block = flat >> 2
    words = philox(
        (
            block & _MASK,
            (block >> 32) & _MASK,
            torch.full_like(flat, step & _MASK),
            torch.full_like(flat, tensor & _MASK),
        ),
        key,
    )
    word = words.gather(1, (flat & 3)[:, None])[:, 0]
    return ((word >> 8).to(torch.float32) * 2.0**-24).view(index.shape)
