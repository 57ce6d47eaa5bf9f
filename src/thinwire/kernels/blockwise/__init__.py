"""Block quantization as one opaque custom op per direction, picked by device.

Ops write into a buffer that the caller owns, so a message can be built and read in place.
"""

from torch import Tensor

from thinwire.kernels.blockwise.reference import meta_nbytes, wire_nbytes
from thinwire.kernels.ops import cpu_op
from thinwire.kernels.parallel import DTYPE_CODES, array, backend, run
from thinwire.kernels.random import kernel_words

__all__ = ["decode_", "encode_", "meta_nbytes", "sum_", "wire_nbytes"]

_PACKAGE = "thinwire.kernels.blockwise"


def _half(bits: int, symmetric: bool) -> int:
    return 2 ** (bits - 1) - 1 if symmetric else 0


@cpu_op("blockwise_encode", "out")
def encode_(
    x: Tensor,
    out: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
    stochastic: bool,
    key: int,
    tensor: int,
    step: int,
    offset: int,
) -> None:
    """Encode x [N] into out [W] (see `reference.encode`); the last four are a `RandomKey`."""
    run(
        backend(_PACKAGE, "cpu").encode,
        num_blocks,
        num_blocks * block_size,
        array(x),
        DTYPE_CODES[x.dtype],
        array(out),
        num_blocks,
        block_size,
        bits,
        layout == "split",
        meta == "bf16",
        _half(bits, symmetric),
        stochastic,
        offset,
        *kernel_words(key, tensor, step),
    )


@encode_.register_kernel("cuda")
def _encode_cuda(x: Tensor, out: Tensor, *shape: object) -> None:
    backend(_PACKAGE, "triton").encode(x, out, *shape)


def _decode_cpu(
    wires: Tensor,
    out: Tensor,
    shape: tuple[int, int, int, str, str, bool],
    accumulate: bool,
) -> None:
    num_blocks, block_size, bits, layout, meta, symmetric = shape
    rows = array(out)
    for r, wire in enumerate(array(wires)):
        run(
            backend(_PACKAGE, "cpu").decode,
            num_blocks,
            num_blocks * block_size,
            wire,
            rows[0 if accumulate else r],
            DTYPE_CODES[out.dtype],
            num_blocks,
            block_size,
            bits,
            layout == "split",
            meta == "bf16",
            _half(bits, symmetric),
            accumulate and r > 0,
        )


@cpu_op("blockwise_decode", "out")
def decode_(
    wires: Tensor,
    out: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
) -> None:
    """Decode wires [R, W] into out [R, N] (see `reference.decode`)."""
    _decode_cpu(wires, out, (num_blocks, block_size, bits, layout, meta, symmetric), False)


@decode_.register_kernel("cuda")
def _decode_cuda(wires: Tensor, out: Tensor, *shape: object) -> None:
    backend(_PACKAGE, "triton").decode(wires, out, *shape)


@cpu_op("blockwise_sum", "out")
def sum_(
    wires: Tensor,
    out: Tensor,
    num_blocks: int,
    block_size: int,
    bits: int,
    layout: str,
    meta: str,
    symmetric: bool,
) -> None:
    """Write the fp32 sum of wires [R, W], in rank order, into out [N]."""
    shape = (num_blocks, block_size, bits, layout, meta, symmetric)
    _decode_cpu(wires, out.unsqueeze(0), shape, True)


@sum_.register_kernel("cuda")
def _sum_cuda(wires: Tensor, out: Tensor, *shape: object) -> None:
    backend(_PACKAGE, "triton").decode_sum(wires, out, *shape)
