"""Philox-4x32-10 uniforms on CUDA: equals `reference.py` bit for bit."""

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.device import RANDOM, grid, launch, random_words, store_tile, uniform_tile

__all__ = ["uniform"]

_BLOCK = 2048


@triton.jit(do_not_specialize=["n", *RANDOM])
def _uniform(out_ptr, n, offset, key_low, key_high, tensor, step,
             BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    first = begin + tl.arange(0, 1)[:, None]
    u = uniform_tile(first + offset, 1, BLOCK, ALIGNED, key_low, key_high, tensor, step)
    store_tile(out_ptr, first + tl.arange(0, BLOCK)[None, :], begin + BLOCK, n, u)


def uniform(out: Tensor, key: int, tensor: int, step: int, offset: int) -> None:
    """Fill out [N] with the uniforms of flat indices offset .. offset + N - 1."""
    n = out.numel()
    launch(
        _uniform, (grid(n, _BLOCK),), out, n, offset, *random_words(key, tensor, step),
        BLOCK=_BLOCK, ALIGNED=offset % 4 == 0,
    )  # fmt: skip
