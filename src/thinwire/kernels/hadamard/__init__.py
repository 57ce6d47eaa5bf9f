"""TACO's group codec as opaque custom ops, picked by device.

`fmt, group, hadamard, alpha, merge, zero, target` are the fields of `reference.Layout`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.hadamard.reference import FORMATS, S_RANGE, Layout, inverse_root
from thinwire.kernels.ops import cpu_op
from thinwire.kernels.parallel import DTYPE_CODES, array, backend, flat_rows, run

__all__ = ["FORMATS", "Layout", "decode_", "decode_sum_", "decode_sum_encode_", "encode_"]

_PACKAGE = "thinwire.kernels.hadamard"
_FORMAT_CODES = {"e4m3": 0, "e5m2": 1, "int8": 2, "int4": 3}


def _spec(layout: Layout) -> tuple[Any, ...]:
    """Return the layout as the tuple that CPU kernels unpack."""
    f32 = np.float32
    encode_range = S_RANGE["int" if layout.fmt.startswith("int") else "fp8"]
    return (
        _FORMAT_CODES[layout.fmt],
        layout.hadamard,
        layout.alpha,
        layout.merge,
        layout.zero,
        f32(layout.target),
        f32(FORMATS[layout.fmt]),
        f32(inverse_root(layout.group)),
        *(f32(v) for v in encode_range),
        *(f32(v) for v in layout.s_range),
    )


@cpu_op("hadamard_encode", "out")
def encode_(
    x: Tensor,
    out: Tensor,
    groups: int,
    fmt: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    merge: bool,
    zero: bool,
    target: float,
) -> None:
    """Encode x [N] into out [W] (see `reference.encode`)."""
    layout = Layout(fmt, group, hadamard, alpha, merge, zero, target)
    kernel = backend(_PACKAGE, "cpu").encode
    dtype = DTYPE_CODES[x.dtype]
    run(kernel, groups, x.numel(), array(x), dtype, array(out), groups, group, _spec(layout))


@cpu_op("hadamard_decode", "out")
def decode_(
    wires: Tensor,
    out: Tensor,
    groups: int,
    fmt: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    merge: bool,
    zero: bool,
    target: float,
) -> None:
    """Decode wires [R, W] into out [R, N] (see `reference.decode`)."""
    layout = Layout(fmt, group, hadamard, alpha, merge, zero, target)
    kernel = backend(_PACKAGE, "cpu").decode
    dtype, spec, rows = DTYPE_CODES[out.dtype], _spec(layout), array(out)
    for r, wire in enumerate(array(wires)):
        run(kernel, groups, out.shape[1], wire, rows[r], dtype, groups, group, spec)


@cpu_op("hadamard_sum", "out")
def decode_sum_(
    wires: Tensor,
    out: Tensor,
    groups: int,
    fmt: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    merge: bool,
    zero: bool,
    target: float,
) -> None:
    """Write the fp32 sum of wires [R, W], in rank order, into out [N]."""
    layout = Layout(fmt, group, hadamard, alpha, merge, zero, target)
    kernel = backend(_PACKAGE, "cpu").decode_sum
    work = wires.numel()
    args = (*flat_rows(wires), wires.shape[1], array(out), groups, group, _spec(layout))
    run(kernel, groups, work, *args)


@cpu_op("hadamard_middle", "out")
def decode_sum_encode_(
    wires: Tensor,
    out: Tensor,
    groups: int,
    fmt: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    merge: bool,
    zero: bool,
    target: float,
    middle: str,
    dtype: torch.dtype,
) -> None:
    """Encode the sum of wires [R, W] into out [W] (see `reference.decode_sum_encode`)."""
    layout = Layout(fmt, group, hadamard, alpha, merge, zero, target)
    kernel = backend(_PACKAGE, "cpu").decode_sum_encode
    rounding = DTYPE_CODES[dtype] if middle == "cast" else 0
    rotated = middle == "rotated" and hadamard
    args = (*flat_rows(wires), wires.shape[1], array(out), groups, group, _spec(layout))
    run(kernel, groups, wires.numel(), *args, rotated, rounding)


@encode_.register_kernel("cuda")
def _encode_cuda(x: Tensor, out: Tensor, groups: int, *layout: Any) -> None:
    backend(_PACKAGE, "triton").encode(x, out, groups, Layout(*layout))


@decode_.register_kernel("cuda")
def _decode_cuda(wires: Tensor, out: Tensor, groups: int, *layout: Any) -> None:
    backend(_PACKAGE, "triton").decode(wires, out, groups, Layout(*layout))


@decode_sum_.register_kernel("cuda")
def _decode_sum_cuda(wires: Tensor, out: Tensor, groups: int, *layout: Any) -> None:
    backend(_PACKAGE, "triton").decode_sum(wires, out, groups, Layout(*layout))


@decode_sum_encode_.register_kernel("cuda")
def _middle_cuda(wires: Tensor, out: Tensor, groups: int, *args: Any) -> None:
    backend(_PACKAGE, "triton").decode_sum_encode(
        wires, out, groups, Layout(*args[:7]), args[7], args[8]
    )
