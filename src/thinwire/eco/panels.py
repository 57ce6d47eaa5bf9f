"""A fused step whose moments are stored in 8 bits: a panel of rows at a time.

1. Read the panel's moments as fp32.
2. Step it with the one-pass kernel.
3. Write the moments back.

A panel stays in the cache, and no fp32 copy of a whole moment is ever held. Where one scale serves
a whole matrix, that matrix is one panel.

Legend: `R C` matrix of a rank's piece; `S` scales.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.eco.placement import Piece
from thinwire.eco.rounding import matrices, quantizer
from thinwire.eco.state import StateForm
from thinwire.eco.tensor import QuantizedTensor
from thinwire.kernels import eco as kernel
from thinwire.kernels.eco import Step
from thinwire.kernels.random import RandomKey

__all__ = ["PANEL", "step_in_panels_"]

PANEL = 2**18  # elements: moments and gradient of a panel take 3 MiB


def step_in_panels_(
    quantized: QuantizedTensor,
    g: Tensor,
    forms: Sequence[StateForm],
    state: dict[str, Any],
    names: tuple[str, int],
    h: Step,
    piece: Piece,
    key: RandomKey | None,
    magnitude_S: Tensor | None,
) -> int:
    """Take one optimizer step; return how many scales were left for non-finite values.

    Args:
        quantized: changed in place.
        g: contiguous gradient, not empty.
        forms: of the moments; one for SGD, two for Adam.
        state: of the parameter; its moments and `step` are those of this step.
        names: the tensor's name and the run's key: moments draw random numbers of their own.
        h: the step's constants.
        piece: where the tensor lies in the whole.
        key: random numbers for stochastic rounding of the weights, None to nearest.
        magnitude_S: magnitudes agreed with other ranks.
    """
    codes, scales = quantized.matrix()
    q, g_RC, left = quantizer(quantized.stored.format), g.view(piece.rows, piece.columns), 0
    for rows, blocks_S, offset in _panels(quantized, piece):
        own = None if key is None else replace(key, offset=key.offset + offset)
        moments = [form.read(state, piece, rows) for form in forms]
        left += kernel.step_(
            codes[rows], scales[blocks_S], g_RC[rows], moments[0],
            moments[1] if h.adam else None, q, h, own,
            magnitude=None if magnitude_S is None else magnitude_S[blocks_S],
            row_stride=piece.full_columns,
        )  # fmt: skip
        for form, moment in zip(forms, moments, strict=True):
            form.write(state, moment, piece, *names, int(state["step"]), rows)
    # Kernels write behind torch's back: whoever caches by version must see it.
    torch.autograd.graph.increment_version(quantized.codes)
    return left


def _panels(quantized: QuantizedTensor, piece: Piece) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows, scales, offset of the flat index) of each panel."""
    fmt, stride = quantized.stored.format, piece.full_columns
    if fmt.granularity == "tensor":
        for rows, blocks_S, offset in matrices(fmt, quantized.blocks, stride):
            yield slice(*rows.indices(piece.rows)), blocks_S, offset
        return
    per_row = quantized.matrix()[1].numel() // piece.rows
    height = max(1, PANEL // piece.columns)
    for first in range(0, piece.rows, height):
        last = min(first + height, piece.rows)
        yield slice(first, last), slice(first * per_row, last * per_row), first * stride
