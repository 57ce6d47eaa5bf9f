"""Chunked top-k with packed indices and 2-bit values, picked by device.

`shape, k, chunking, tile` name a `geometry`; `quant` is "sym", "paper" or "none".
"""

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels.ops import cpu_op
from thinwire.kernels.parallel import DTYPE_CODES, array, backend, run
from thinwire.kernels.topk import reference
from thinwire.kernels.topk.geometry import Geometry, geometry
from thinwire.kernels.topk.reference import LEVELS, head_nbytes, wire_nbytes

__all__ = [
    "LEVELS",
    "Geometry",
    "add_",
    "decode_",
    "encode_",
    "entries_",
    "feedback_",
    "geometry",
    "wire_nbytes",
]

_PACKAGE = "thinwire.kernels.topk"
_QUANTS = {"sym": 0, "paper": 1, "none": 2}


def _encode(
    x: Tensor, residual: Tensor | None, new_residual: Tensor | None, beta: float, out: Tensor,
    geo: Geometry, quant: str, level: str,
) -> None:  # fmt: skip
    if geo.entries == 0:
        return
    cpu = backend(_PACKAGE, "cpu")
    wire, head = array(out), head_nbytes(geo, quant)
    end = head + geo.index_nbytes + (4 * geo.entries if quant == "none" else geo.code_nbytes)
    wire[end:] = 0
    kept = np.empty(geo.entries if quant == "paper" else 0, np.float32)
    none = np.empty(0, np.float32)
    old = none if residual is None else array(residual)
    new = none if new_residual is None else array(new_residual)
    most = int(geo.k.max())
    run(
        cpu.encode, geo.chunks, geo.numel, array(x), DTYPE_CODES[x.dtype], old, new,
        np.float32(beta), residual is not None, wire, kept, _QUANTS[quant], level == "bf16", head,
        geo.index_nbytes, geo.base, geo.height, geo.width, geo.k, geo.first, geo.index_at,
        geo.code_at, geo.pitch, geo.tile_width, most,
    )  # fmt: skip
    if quant == "paper":
        cpu.paper_codes(
            0, 1, kept, wire, head, geo.index_nbytes, geo.k, geo.first, geo.code_at, most
        )
        if residual is not None:
            run(
                cpu.paper_residual, geo.chunks, geo.entries, wire, kept, new, head, geo.base,
                geo.k, geo.first, geo.index_at, geo.pitch, geo.tile_width,
            )  # fmt: skip


@cpu_op("topk_encode", "out")
def encode_(
    x: Tensor, out: Tensor, shape: list[int], k: int, chunking: str, tile: int, quant: str,
    level: str,
) -> None:  # fmt: skip
    """Encode x [N] into out [W] (see `reference.encode`)."""
    _encode(x, None, None, 0.0, out, geometry(tuple(shape), k, chunking, tile), quant, level)


@cpu_op("topk_feedback", "out", "new_residual")
def feedback_(
    delta: Tensor, residual: Tensor, new_residual: Tensor, beta: float, out: Tensor,
    shape: list[int], k: int, chunking: str, tile: int, quant: str, level: str,
) -> None:  # fmt: skip
    """Encode a = beta*residual + delta into out and write a - decode(out) to new_residual.

    residual and new_residual are fp32 [N] and do not overlap.
    """
    geo = geometry(tuple(shape), k, chunking, tile)
    _encode(delta, residual, new_residual, beta, out, geo, quant, level)


def _decode_args(geo: Geometry, quant: str, level: str) -> tuple[Any, ...]:
    return (
        _QUANTS[quant], level == "bf16", head_nbytes(geo, quant), geo.index_nbytes, geo.base,
        geo.height, geo.width, geo.k, geo.first, geo.index_at, geo.code_at, geo.pitch,
        geo.tile_width, int(geo.k.max()),
    )  # fmt: skip


def _refuse(bad: int) -> None:
    if bad:
        raise WireError(
            f"a top-k message has indices out of order or outside their chunk ({bad} chunks)"
        )


@cpu_op("topk_decode", "out")
def decode_(
    wires: Tensor, out: Tensor, shape: list[int], k: int, chunking: str, tile: int, quant: str,
    level: str,
) -> None:  # fmt: skip
    """Decode wires [R, W] into out [R, N].

    Raises:
        WireError: indices that no encoder writes.
    """
    geo = geometry(tuple(shape), k, chunking, tile)
    if geo.entries == 0:
        return
    kernel, rows = backend(_PACKAGE, "cpu").decode, array(out)
    for r, wire in enumerate(array(wires)):
        args = (wire, rows[r], DTYPE_CODES[out.dtype], *_decode_args(geo, quant, level))
        _refuse(sum(run(kernel, geo.chunks, geo.numel, *args)))


@cpu_op("topk_add", "out")
def add_(
    wires: Tensor, out: Tensor, shape: list[int], k: int, chunking: str, tile: int, quant: str,
    level: str,
) -> None:  # fmt: skip
    """Add the entries of wires [R, W], in rank order, to fp32 out [N] (see `decode_`)."""
    geo = geometry(tuple(shape), k, chunking, tile)
    if geo.entries == 0:
        return
    kernel, total = backend(_PACKAGE, "cpu").add, array(out)
    for wire in array(wires):
        _refuse(
            sum(run(kernel, geo.chunks, geo.entries, wire, total, *_decode_args(geo, quant, level)))
        )


@cpu_op("topk_entries", "position", "value")
def entries_(
    wire: Tensor, position: Tensor, value: Tensor, shape: list[int], k: int, chunking: str,
    tile: int, quant: str, level: str,
) -> None:  # fmt: skip
    """Write the flat positions int64 [K] and the fp32 values [K] that wire [W] holds.

    Raises:
        WireError: indices that no encoder writes.
    """
    geo = geometry(tuple(shape), k, chunking, tile)
    if geo.entries:
        kernel = backend(_PACKAGE, "cpu").entries
        args = (array(wire), array(position), array(value), *_decode_args(geo, quant, level))
        _refuse(sum(run(kernel, geo.chunks, geo.entries, *args)))


@entries_.register_kernel("cuda")
def _entries_cuda(
    wire: Tensor, position: Tensor, value: Tensor, shape: list[int], k: int, chunking: str,
    tile: int, quant: str, level: str,
) -> None:  # fmt: skip
    geo = geometry(tuple(shape), k, chunking, tile)
    if geo.entries:
        at, v = reference.entries(wire, geo, quant, level)
        position.copy_(at)
        value.copy_(v)


@encode_.register_kernel("cuda")
def _encode_cuda(
    x: Tensor, out: Tensor, shape: list[int], k: int, chunking: str, tile: int, quant: str,
    level: str,
) -> None:  # fmt: skip
    geo = geometry(tuple(shape), k, chunking, tile)
    backend(_PACKAGE, "triton").encode(x, None, None, 0.0, out, geo, quant, level)


@feedback_.register_kernel("cuda")
def _feedback_cuda(
    delta: Tensor, residual: Tensor, new_residual: Tensor, beta: float, out: Tensor,
    shape: list[int], k: int, chunking: str, tile: int, quant: str, level: str,
) -> None:  # fmt: skip
    geo = geometry(tuple(shape), k, chunking, tile)
    backend(_PACKAGE, "triton").encode(delta, residual, new_residual, beta, out, geo, quant, level)


@decode_.register_kernel("cuda")
def _decode_cuda(
    wires: Tensor, out: Tensor, shape: list[int], k: int, chunking: str, tile: int, quant: str,
    level: str,
) -> None:  # fmt: skip
    geo = geometry(tuple(shape), k, chunking, tile)
    _refuse(backend(_PACKAGE, "triton").decode(wires, out, geo, quant, level))


@add_.register_kernel("cuda")
def _add_cuda(
    wires: Tensor, out: Tensor, shape: list[int], k: int, chunking: str, tile: int, quant: str,
    level: str,
) -> None:  # fmt: skip
    geo = geometry(tuple(shape), k, chunking, tile)
    _refuse(backend(_PACKAGE, "triton").add(wires, out, geo, quant, level))
