"""From values to codes and back for each format: the kernels, plus what they leave out.

The kernels know one scale per row, per group of a row, or per matrix. Here stacks of matrices
(experts), bf16, scales agreed over ranks, and empty shards are added.

Legend: `R` rows, `C` columns, `W` code bytes of a row, `S` scales.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.eco.formats import Blocks, Format
from thinwire.eco.placement import Piece
from thinwire.kernels import eco as kernel
from thinwire.kernels.eco import Quantizer, Step, reference
from thinwire.kernels.random import RandomKey
from thinwire.kernels.random.reference import uniform

if TYPE_CHECKING:
    from thinwire.eco.tensor import QuantizedTensor

__all__ = [
    "decode",
    "encode",
    "fused_step_",
    "magnitudes",
    "matrices",
    "quantizer",
    "scales_of",
    "uniforms",
]


def quantizer(fmt: Format) -> Quantizer:
    """Return the kernels' name of a format with scales."""
    group = {"row": 0, "tensor": -1, "group": fmt.group_size}[fmt.granularity]
    return Quantizer(fmt.fmt, group, fmt.pow2_scale)


def matrices(fmt: Format, blocks: Blocks, row_stride: int) -> list[tuple[slice, slice, int]]:
    """Return (rows, scales, offset of the flat index) of each matrix that kernels take at once."""
    if fmt.granularity != "tensor" or not fmt.has_scales:
        return [(slice(None), slice(None), 0)]
    step = blocks.rows_per_scale
    return [
        (slice(i * step, (i + 1) * step), slice(i, i + 1), i * step * row_stride)
        for i in range(math.prod(blocks.scale_shape))
    ]


def uniforms(shape: torch.Size, key: RandomKey, row_stride: int, device: torch.device) -> Tensor:
    """Return the random numbers of a piece's elements, fp32 [R, C]."""
    run_key, tensor, step, offset = key.words
    row = torch.arange(shape[0], device=device) * row_stride + offset
    index_RC = row[:, None] + torch.arange(shape[1], device=device)
    return uniform(index_RC, run_key, tensor, step)


def magnitudes(x_RC: Tensor, fmt: Format, blocks: Blocks) -> Tensor:
    """Return the largest magnitudes [S] over the elements that share a scale."""
    if not x_RC.numel():
        return x_RC.new_zeros(math.prod(blocks.scale_shape))
    group = quantizer(fmt).group
    return torch.cat([reference.absmax(x_RC[rows], group) for rows, *_ in matrices(fmt, blocks, 0)])


def scales_of(magnitude_S: Tensor, fmt: Format) -> Tensor:
    """Return the scales of blocks with these largest magnitudes."""
    return reference.scale_of(magnitude_S, kernel.RHO[fmt.fmt], fmt.pow2_scale)


def encode(
    x_RC: Tensor, fmt: Format, blocks: Blocks, key: RandomKey | None = None, *,
    row_stride: int | None = None, magnitude_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes [R, W] and scales [S] of finite fp32 values.

    Args:
        x_RC: the values.
        fmt: storage format.
        blocks: how the piece is cut.
        key: random numbers for stochastic rounding, its offset the first element's flat index in
            the full tensor; None rounds to nearest.
        row_stride: columns of the full tensor.
        magnitude_S: magnitudes agreed with the ranks that hold other parts of the blocks.
    """
    stride = row_stride or blocks.columns
    if not fmt.has_scales:
        return _encode_bf16(x_RC, key, stride), x_RC.new_empty(0)
    q = quantizer(fmt)
    if x_RC.numel() == 0:
        width = fmt.code_columns(blocks.columns)
        codes = torch.empty(blocks.rows, width, dtype=torch.uint8, device=x_RC.device)
        return codes, scales_of(
            magnitudes(x_RC, fmt, blocks) if magnitude_S is None else magnitude_S, fmt
        )
    if magnitude_S is not None and q.group >= 0:
        u = None if key is None else uniforms(x_RC.shape, key, stride, x_RC.device)
        scales = scales_of(magnitude_S, fmt)
        return reference.quantize_with(x_RC, scales, q, u)[0], scales
    parts = []
    for rows, blocks_S, offset in matrices(fmt, blocks, stride):
        own = None if key is None else replace(key, offset=key.offset + offset)
        known = None if magnitude_S is None else magnitude_S[blocks_S]
        parts.append(kernel.quantize(x_RC[rows], q, own, magnitude=known, row_stride=stride))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def decode(codes: Tensor, scales_S: Tensor, fmt: Format, blocks: Blocks) -> Tensor:
    """Return the fp32 values [R, C] of codes [R, W] and scales [S]."""
    if not fmt.has_scales:
        return codes.to(torch.float32)
    out = torch.empty(blocks.rows, blocks.columns, device=codes.device)
    if out.numel():
        for rows, blocks_S, _ in matrices(fmt, blocks, 0):
            kernel.dequantize(
                codes[rows], scales_S[blocks_S], blocks.columns, quantizer(fmt), out=out[rows]
            )
    return out


def fused_step_(
    quantized: "QuantizedTensor", g: Tensor, moments: list[Tensor], h: Step, piece: Piece,
    key: RandomKey | None, magnitude_S: Tensor | None,
) -> int:  # fmt: skip
    """Take one optimizer step in one pass; return how many scales were left for non-finite values.

    Args:
        quantized: changed in place.
        g: contiguous gradient.
        moments: fp32 or bf16, changed in place; one for SGD, two for Adam.
        h: the step's constants.
        piece: where the tensor lies in the whole.
        key: random numbers for stochastic rounding, None to nearest.
        magnitude_S: magnitudes agreed with other ranks.
    """
    fmt, blocks = quantized.stored.format, quantized.blocks
    codes, scales = quantized.matrix()
    if not g.numel():
        if magnitude_S is not None:
            scales.copy_(scales_of(magnitude_S, fmt))
        return 0
    g_RC, m_RC = g.view(piece.rows, piece.columns), moments[0].view(piece.rows, piece.columns)
    v_RC = moments[1].view(piece.rows, piece.columns) if h.adam else None
    left = 0
    for rows, blocks_S, offset in matrices(fmt, blocks, piece.full_columns):
        own = None if key is None else replace(key, offset=key.offset + offset)
        left += kernel.step_(
            codes[rows], scales[blocks_S], g_RC[rows], m_RC[rows],
            None if v_RC is None else v_RC[rows], quantizer(fmt), h, own,
            magnitude=None if magnitude_S is None else magnitude_S[blocks_S],
            row_stride=piece.full_columns,
        )  # fmt: skip
    # Kernels write behind torch's back: whoever caches by version must see it.
    torch.autograd.graph.increment_version(quantized.codes)
    return left


def _encode_bf16(x_RC: Tensor, key: RandomKey | None, row_stride: int) -> Tensor:
    if key is None:
        return x_RC.to(torch.bfloat16)
    if row_stride == x_RC.shape[1]:
        return kernel.stochastic_bf16(x_RC.contiguous(), key)
    u = uniforms(x_RC.shape, key, row_stride, x_RC.device)
    return reference.stochastic_bf16(x_RC.contiguous(), (u * 2.0**32).to(torch.int64))
