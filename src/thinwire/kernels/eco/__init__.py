"""ECO's low-bit storage and its fused optimizer step, picked by device.

Codes are uint8 [R, code_columns], scales fp32 [S]; `Quantizer` names format and granularity.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.kernels.eco.reference import RHO, Quantizer, Step, code_columns, num_scales
from thinwire.kernels.parallel import DTYPE_CODES, array, backend, run
from thinwire.kernels.random import RandomKey, kernel_words

__all__ = [
    "RHO",
    "Quantizer",
    "Step",
    "code_columns",
    "dequantize",
    "num_scales",
    "quantize",
    "step_",
    "step_absmax",
    "stochastic_bf16",
]

_PACKAGE = "thinwire.kernels.eco"
_FORMAT_CODES = {"fp8_e4m3": 0, "int8": 1, "int4": 2}
_BLOCK = 4096


def _matrix(x: Tensor) -> Tensor:
    """Return x as a contiguous [R, C] view."""
    if not x.is_contiguous():
        raise ConfigError("ECO kernels work in place on contiguous tensors: call .contiguous()")
    return x.view(x.shape[0], -1) if x.dim() > 1 and x.numel() else x.view(max(len(x), 1), -1)


def _geometry(columns: int, q: Quantizer) -> tuple[int, int, int, int]:
    """Return (code bytes per row, format code, elements per scale, scales per row)."""
    size = q.group if q.group > 0 else max(columns, 1)
    per_row = 0 if q.group < 0 else max(-(-columns // size), 1)
    return code_columns(columns, q.fmt), _FORMAT_CODES[q.fmt], size, per_row


def _constants(h: Step) -> tuple[Any, ...]:
    f32 = np.float32
    return (
        h.adam, f32(h.lr), f32(h.b1), f32(1 - h.b1), f32(h.b2), f32(1 - h.b2), f32(h.eps),
        f32(h.c1), f32(h.c2), f32(h.decay), f32(h.inject),
    )  # fmt: skip


def _random(
    key: RandomKey | None, stride: int
) -> tuple[bool, int, int, np.uint64, np.uint32, np.uint32]:
    words = (key or RandomKey()).words
    return (key is not None, words[3], stride, *kernel_words(*words[:3]))


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    key: RandomKey | None = None,
    *,
    magnitude: Tensor | None = None,
    row_stride: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x [R, ...].

    Args:
        x: finite values, fp32, bf16 or fp16.
        quantizer: format and granularity.
        key: None rounds to nearest even; a key rounds stochastically with flat indices
            key.offset + row*row_stride + column.
        magnitude: for group -1 only: the largest magnitude [1] agreed over ranks.
        row_stride: columns of the full tensor (None: those of x).
    """
    x_RC = _matrix(x.contiguous())
    rows, columns = x_RC.shape
    if x.device.type == "cuda":
        triton = backend(_PACKAGE, "triton")
        codes_and_scales: tuple[Tensor, Tensor] = triton.quantize(
            x_RC, quantizer, key, magnitude, row_stride or columns
        )
        return codes_and_scales
    width, fmt, size, per_row = _geometry(columns, quantizer)
    codes = torch.empty(rows, width, dtype=torch.uint8)
    scales = torch.empty(num_scales(rows, columns, quantizer.group))
    if magnitude is None:
        magnitude = x_RC.new_zeros(1, dtype=torch.float32)
        if quantizer.group < 0 and x_RC.numel():
            # aminmax in place of abs: no copy of the tensor
            low, high = x_RC.aminmax()
            magnitude = torch.maximum(-low.float(), high.float()).view(1)
    run(
        backend(_PACKAGE, "cpu").quantize, rows, x.numel(), array(x_RC.view(-1)),
        DTYPE_CODES[x.dtype], array(codes.view(-1)), array(scales), array(magnitude), columns,
        width, fmt, np.float32(RHO[quantizer.fmt]), size, per_row, quantizer.pow2_scale,
        *_random(key, row_stride or columns),
    )  # fmt: skip
    return codes, scales


def dequantize(
    codes: Tensor,
    scales: Tensor,
    columns: int,
    quantizer: Quantizer,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return [R, C] in `dtype` from codes and scales (`out`, if given, is contiguous)."""
    rows = codes.shape[0]
    if out is None:
        out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if codes.device.type == "cuda":
        backend(_PACKAGE, "triton").dequantize(codes, scales, out, quantizer)
        return out
    width, fmt, size, per_row = _geometry(columns, quantizer)
    run(
        backend(_PACKAGE, "cpu").dequantize, rows, out.numel(), array(codes.reshape(-1)),
        array(scales), array(out.view(-1)), DTYPE_CODES[out.dtype], columns, width, fmt, size,
        per_row,
    )  # fmt: skip
    return out


def step_absmax(
    codes: Tensor,
    scales: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
    quantizer: Quantizer,
    h: Step,
) -> Tensor:
    """Return the magnitudes [S] of the weights after the step, before rounding; no state changes.

    Ranks that share a scale (one scale per tensor; rows split over ranks) take the maximum of
    these and pass it to `step_`. A non-finite entry tells of a non-finite step.
    """
    if grad.device.type == "cuda":
        magnitudes: Tensor = backend(_PACKAGE, "triton").step_absmax(
            codes, scales, _matrix(grad), exp_avg, exp_avg_sq, quantizer, h
        )
        return magnitudes
    g_RC = _matrix(grad)
    rows, columns = g_RC.shape
    width, fmt, size, per_row = _geometry(columns, quantizer)
    magnitude = torch.zeros(rows * max(per_row, 1))
    m = array(exp_avg.view(-1))
    run(
        backend(_PACKAGE, "cpu").step_absmax, rows, grad.numel(), array(codes.view(-1)),
        array(scales), array(g_RC.view(-1)), DTYPE_CODES[grad.dtype], m,
        m if exp_avg_sq is None else array(exp_avg_sq.view(-1)), DTYPE_CODES[exp_avg.dtype],
        array(magnitude), columns, width, fmt, size, per_row, _constants(h),
    )  # fmt: skip
    if quantizer.group >= 0:
        return magnitude
    return magnitude.amax().view(1) if rows else magnitude.new_zeros(1)


def step_(
    codes: Tensor,
    scales: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
    quantizer: Quantizer,
    h: Step,
    key: RandomKey | None = None,
    *,
    magnitude: Tensor | None = None,
    row_stride: int | None = None,
) -> int:
    """Take one ECO step in place; return how many scales were left alone for non-finite weights.

    Args:
        codes: uint8 [R, code_columns].
        scales: fp32 [S].
        grad: [R, ...], fp32, bf16 or fp16.
        exp_avg: first moments [R, ...], fp32 or bf16.
        exp_avg_sq: second moments, likewise; None for SGD.
        quantizer: format and granularity.
        h: the step's constants; lr must not be 0 (such a step updates moments alone).
        key: None rounds to nearest even; a key rounds stochastically.
        magnitude: None, or magnitudes [S] agreed over ranks (see `step_absmax`).
        row_stride: columns of the full tensor (None: those of grad).
    """
    if magnitude is None and quantizer.group < 0:
        magnitude = step_absmax(codes, scales, grad, exp_avg, exp_avg_sq, quantizer, h)
    g_RC = _matrix(grad)
    rows, columns = g_RC.shape
    if grad.device.type == "cuda":
        left: int = backend(_PACKAGE, "triton").step(
            codes, scales, g_RC, exp_avg, exp_avg_sq, quantizer, h, key, magnitude,
            row_stride or columns,
        )  # fmt: skip
        return left
    width, fmt, size, per_row = _geometry(columns, quantizer)
    if per_row == 0 and magnitude is not None and not torch.isfinite(magnitude).all():
        return 1
    # One scale for all rows must stay readable until the last row is dequantized.
    new_scales = scales.clone() if per_row == 0 else scales
    m = array(exp_avg.view(-1))
    bad = run(
        backend(_PACKAGE, "cpu").step, rows, grad.numel(), array(codes.view(-1)), array(scales),
        array(new_scales), array(g_RC.view(-1)), DTYPE_CODES[grad.dtype], m,
        m if exp_avg_sq is None else array(exp_avg_sq.view(-1)), DTYPE_CODES[exp_avg.dtype],
        array(magnitude) if magnitude is not None else np.empty(0, np.float32),
        columns, width, fmt, np.float32(RHO[quantizer.fmt]), size, per_row, quantizer.pow2_scale,
        _constants(h), *_random(key, row_stride or columns),
    )  # fmt: skip
    if per_row == 0:
        scales.copy_(new_scales)
    return sum(bad)


def stochastic_bf16(x: Tensor, key: RandomKey, *, out: Tensor | None = None) -> Tensor:
    """Return fp32 x rounded stochastically to bf16 (`out` may be given)."""
    out = torch.empty_like(x, dtype=torch.bfloat16) if out is None else out
    run_key, tensor, step, offset = key.words
    if x.device.type == "cuda":
        backend(_PACKAGE, "triton").stochastic_bf16(x, key, out)
        return out
    run(
        backend(_PACKAGE, "cpu").stochastic_bf16, -(-x.numel() // _BLOCK), x.numel(),
        array(x.reshape(-1)), array(out.view(-1)), _BLOCK, offset,
        *kernel_words(run_key, tensor, step),
    )  # fmt: skip
    return out
