"""Block quantization as one opaque custom op per direction, picked by device.

Ops write into a buffer that the caller owns, so a message can be built and read in place.
"""

import torch
from torch import Tensor

from thinwire.kernels.blockwise import reference
from thinwire.kernels.blockwise.reference import wire_nbytes

__all__ = ["decode_", "encode_", "wire_nbytes"]


@torch.library.custom_op("thinwire::blockwise_encode", mutates_args=("out",), device_types="cpu")
def encode_(
    x: Tensor, out: Tensor, num_blocks: int, block_size: int, bits: int, layout: str, meta: str
) -> None:
    """Encode x [N] into out [W], rounding to nearest even (see `reference.encode`)."""
    out.copy_(reference.encode(x, num_blocks, block_size, bits, layout, meta, None))


@torch.library.custom_op("thinwire::blockwise_decode", mutates_args=("out",), device_types="cpu")
def decode_(
    wires: Tensor, out: Tensor, num_blocks: int, block_size: int, bits: int, layout: str, meta: str
) -> None:
    """Decode wires [R, W] into out [R, N] (see `reference.decode`)."""
    reference.decode(wires, out, num_blocks, block_size, bits, layout, meta)
