"""How optimizer state is held: fp32, bf16, or 8 bits with a scale per 256 columns.

The 8-bit form is E4M3, rounded stochastically with the tensor's own random numbers: nearest
rounding would freeze moments that move by a few percent a step. Second moments are stored as their
root, which halves the range, and never fall to zero, since weights are divided by them. Blocks lie
within rows, so state can be cut by rows over any number of ranks.

Legend: `R C` matrix of the piece.

Reference: block-wise state after Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
arXiv 2110.02861 (its code table is another).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.eco.placement import Piece, local_like, plain
from thinwire.errors import ConfigError
from thinwire.kernels import eco as kernel
from thinwire.kernels.random import tensor_id

__all__ = ["STATE_DTYPES", "StateForm"]

STATE_DTYPES = ("fp32", "bf16", "8bit")
COLUMNS = 256
_SCALE = "_scale"
_ALL = slice(None)
_EIGHT_BITS = kernel.Quantizer("fp8_e4m3", COLUMNS)


@dataclass(frozen=True)
class StateForm:
    """Creates, reads and writes one kind of state tensor.

    Attributes:
        dtype: one of `STATE_DTYPES`.
        key: name of the state, such as "exp_avg".
        is_square: stored as its root (second moments); 8-bit only.
    """

    dtype: str
    key: str
    is_square: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in STATE_DTYPES:
            raise ConfigError(
                f"state_dtype must be one of {', '.join(STATE_DTYPES)}, got {self.dtype!r}"
            )

    def create(self, state: dict[str, Any], param: Tensor, piece: Piece, lead_dims: int) -> None:
        """Put zeros into an optimizer's state."""
        local = plain(param)
        shape, device = tuple(local.shape), local.device
        if self.dtype == "8bit":
            groups = -(-piece.columns // COLUMNS)
            scales = torch.ones(*shape[:lead_dims], groups, device=device)
            whole = (*param.shape[:lead_dims], groups * (piece.full_columns // piece.columns or 1))
            state[self.key + _SCALE] = local_like(param, scales, whole)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}[self.dtype]
        state[self.key] = local_like(param, torch.zeros(shape, dtype=dtype, device=device))

    def read(self, state: dict[str, Any], piece: Piece, rows: slice = _ALL) -> Tensor:
        """Return these rows of the matrix as fp32 [R, C]."""
        x = plain(state[self.key]).view(piece.rows, piece.columns)[rows]
        if self.dtype != "8bit" or not x.numel():
            return x.to(torch.float32)
        scales = self._scales(state, piece)[rows].reshape(-1)
        value = kernel.dequantize(x, scales, piece.columns, _EIGHT_BITS)
        return value.square_() if self.is_square else value

    def _scales(self, state: dict[str, Any], piece: Piece) -> Tensor:
        return plain(state[self.key + _SCALE]).view(piece.rows, -1)

    def write(
        self,
        state: dict[str, Any],
        value_RC: Tensor,
        piece: Piece,
        name: str,
        run_key: int,
        step: int,
        rows: slice = _ALL,
    ) -> None:
        """Replace the content of these rows."""
        x = plain(state[self.key]).view(piece.rows, piece.columns)[rows]
        if self.dtype != "8bit":
            x.copy_(value_RC)
            return
        if self.is_square:
            value_RC = value_RC.sqrt()
        if not x.numel():
            return
        key = piece.key(run_key, tensor_id(f"{name}/{self.key}"), step)
        key = replace(key, offset=key.offset + (rows.start or 0) * piece.full_columns)
        codes, scales = kernel.quantize(value_RC, _EIGHT_BITS, key, row_stride=piece.full_columns)
        if self.is_square:
            codes = torch.where((codes == 0) & (value_RC > 0), torch.ones_like(codes), codes)
        x.copy_(codes)
        own = self._scales(state, piece)[rows]
        own.copy_(scales.view(own.shape))
