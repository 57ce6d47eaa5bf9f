"""Quantized weights in plain torch: grids, scales, rounding, and the optimizer steps around them.

A matrix [R, C] is cut into blocks of `rows` x `cols` elements that share a scale:

    scale = max(absmax / rho, 2^-100),  1 for an all-zero block,  optionally a power of two
    code  = round(clamp(x / scale, -rho, rho))  to the format's grid,  value = code * scale

Rounding is to nearest (ties to even), or stochastic with uniforms u in [0, 1): up with the
probability that makes the mean exact. The step functions take any float dtype; in fp64 they are
the oracles of the optimizers' identities.

Legend: `R` rows, `C` columns, `S G` blocks along rows and columns.

Reference: Nikdan et al., "ECO: Quantized Training without Full-Precision Master Weights",
arXiv 2601.22101.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "RHO",
    "Adam",
    "Sgd",
    "adam_inject",
    "adam_target",
    "block_absmax",
    "decode",
    "encode",
    "pack",
    "quantize",
    "round_to_grid",
    "scale_of",
    "sgd_exact_inject",
    "sgd_inject",
    "sgd_target",
    "unpack",
]

# Largest grid point of each format; -8 of int4 and -128 of int8 are never used.
RHO = {"fp8_e4m3": 448.0, "int8": 127.0, "int4": 7.0}

MIN_SCALE = 2.0**-100
Quantizer = Callable[[Tensor], Tensor]


# -- grids --------------------------------------------------------------------------------------


def round_to_grid(y: Tensor, fmt: str, u: Tensor | None) -> Tensor:
    """Return y rounded to the format's grid; stochastically if uniforms `u` are given.

    bf16 takes u as multiples of 2^-16: that is the random integer added below the kept bits.
    """
    if fmt == "bf16":
        return _round_bf16(y, u)
    rho = RHO[fmt]
    y = y.clamp(-rho, rho)
    if fmt == "fp8_e4m3":
        if u is None:
            return y.to(torch.float32).to(torch.float8_e4m3fn).to(y.dtype)
        return _round_e4m3(y, u)
    return y.round() if u is None else (y + u).floor().clamp(-rho, rho)


def _round_e4m3(y: Tensor, u: Tensor) -> Tensor:
    # frexp gives |y| = f * 2^k with f in [0.5, 1): the exponent of y is k - 1. True spacing, also
    # below the smallest normal number.
    size = y.abs()
    exponent = (torch.frexp(size).exponent - 1).clamp(min=-6)
    gap = torch.ldexp(torch.ones_like(size), exponent - 3)
    k = (size / gap).floor()
    k = k + (u < size / gap - k)
    return torch.copysign(k * gap, y)


def _round_bf16(y: Tensor, u: Tensor | None) -> Tensor:
    if u is None:
        return y.to(torch.float32).to(torch.bfloat16).to(y.dtype)
    bits = y.to(torch.float32).contiguous().view(torch.int32)
    noise = (u * 65536).to(torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).to(y.dtype)


def pack(q: Tensor, fmt: str) -> Tensor:
    """Return grid values [R, C] as stored codes: uint8 [R, C], int4 [R, ceil(C/2)], or bf16."""
    if fmt == "bf16":
        return q.to(torch.bfloat16)
    if fmt == "fp8_e4m3":
        return q.to(torch.float8_e4m3fn).view(torch.uint8)
    if fmt == "int8":
        return q.to(torch.int8).view(torch.uint8)
    nibbles = (q + 8).to(torch.uint8)
    if nibbles.shape[1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack(codes: Tensor, fmt: str, columns: int) -> Tensor:
    """Return the fp32 grid values [R, C] of stored codes."""
    if fmt == "bf16":
        return codes.to(torch.float32)
    if fmt == "fp8_e4m3":
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    if fmt == "int8":
        return codes.view(torch.int8).to(torch.float32)
    pairs = torch.stack((codes & 15, codes >> 4), -1).view(codes.shape[0], 2 * codes.shape[1])
    return pairs[:, :columns].to(torch.float32) - 8


# -- scales -------------------------------------------------------------------------------------


def block_absmax(x_RC: Tensor, rows: int, cols: int) -> Tensor:
    """Return the largest absolute value of each block, [S, G]; an empty matrix has one zero row."""
    num_rows, num_cols = x_RC.shape
    groups = max(1, -(-num_cols // cols))
    if x_RC.numel() == 0:
        return x_RC.new_zeros(max(1, num_rows // rows), groups)
    size = x_RC.abs()
    if groups * cols != num_cols and groups > 1:
        size = torch.nn.functional.pad(size, (0, groups * cols - num_cols))
    return size.view(num_rows // rows, rows, groups, -1).amax((1, 3))


def scale_of(absmax: Tensor, fmt: str, pow2: bool) -> Tensor:
    """Return the scale of blocks with these largest values."""
    scale = (absmax / RHO[fmt]).clamp(min=MIN_SCALE)
    if pow2:
        mantissa, exponent = torch.frexp(scale)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def _spread(scale_SG: Tensor, shape: torch.Size, rows: int, cols: int) -> Tensor:
    """Return the scales as something that broadcasts against [R, C]."""
    wide = scale_SG.repeat_interleave(rows, 0) if rows > 1 and scale_SG.shape[0] > 1 else scale_SG
    return wide if wide.shape[1] == 1 else wide.repeat_interleave(cols, 1)[:, : shape[1]]


def encode(
    x_RC: Tensor, fmt: str, rows: int, cols: int, *, pow2: bool = False,
    u_RC: Tensor | None = None, absmax_SG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes and fp32 scales [S, G] of a matrix.

    Args:
        x_RC: fp32 values, finite.
        fmt: format, a key of `RHO` or "bf16" (whose scales are empty).
        rows: rows of a block.
        cols: columns of a block; the last block of a row may be narrower.
        pow2: round scales up to powers of two.
        u_RC: uniforms for stochastic rounding; None rounds to nearest.
        absmax_SG: largest values to use instead of the matrix's own (of a whole that was split).
    """
    if fmt == "bf16":
        return pack(round_to_grid(x_RC, fmt, u_RC), fmt), x_RC.new_empty(0)
    absmax_SG = block_absmax(x_RC, rows, cols) if absmax_SG is None else absmax_SG
    scale_SG = scale_of(absmax_SG, fmt, pow2)
    y = x_RC / _spread(scale_SG, x_RC.shape, rows, cols)
    return pack(round_to_grid(y, fmt, u_RC), fmt), scale_SG


def decode(codes: Tensor, scale_SG: Tensor, fmt: str, columns: int, rows: int, cols: int) -> Tensor:
    """Return the fp32 values [R, C] of codes and scales."""
    q = unpack(codes, fmt, columns)
    return q if fmt == "bf16" else q * _spread(scale_SG, q.shape, rows, cols)


def quantize(x_RC: Tensor, fmt: str, rows: int, cols: int, u_RC: Tensor | None = None) -> Tensor:
    """Return decode(encode(x))."""
    codes, scale = encode(x_RC, fmt, rows, cols, u_RC=u_RC)
    return decode(codes, scale, fmt, x_RC.shape[1], rows, cols)


# -- steps --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """The numbers of one AdamW step.

    Attributes:
        lr: learning rate of this step.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        step: steps taken, this one included.
        inject_lr: learning rate that the injection divides by.
        decay_factor: multiply the injection by 1 - lr * weight_decay.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    inject_lr: float
    decay_factor: bool = False

    @property
    def correction1(self) -> float:
        """Return 1 - beta1^step."""
        return 1 - self.beta1**self.step

    @property
    def correction2(self) -> float:
        """Return 1 - beta2^step."""
        return 1 - self.beta2**self.step

    @property
    def injection(self) -> float:
        """Return the (negative) factor of den * error in the first moment."""
        factor = 1 - self.lr * self.weight_decay if self.decay_factor else 1.0
        return factor * self.correction1 / self.inject_lr * (1 - 1 / self.beta1)


def adam_target(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Adam
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the unrounded new weights, both new moments and the denominator."""
    m = m * h.beta1 + g * (1 - h.beta1)
    v = v * h.beta2 + g * g * (1 - h.beta2)
    den = (v / h.correction2).sqrt() + h.eps
    target = w * (1 - h.lr * h.weight_decay) - (m / den) * (h.lr / h.correction1)
    return target, m, v, den


def adam_inject(m: Tensor, den: Tensor, error: Tensor, h: Adam) -> Tensor:
    """Return the first moment that carries the rounding error."""
    return m + h.injection * (den * error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """The numbers of one step of SGD with an averaged momentum.

    Attributes:
        lr: learning rate of this step.
        momentum: beta of m = beta * m + (1 - beta) * g.
        weight_decay: decoupled decay.
        inject_lr: learning rate that the injection divides by; the next step's in the exact rule.
        decay_factor: multiply the injection by 1 - lr * weight_decay.
    """

    lr: float
    momentum: float
    weight_decay: float
    inject_lr: float
    decay_factor: bool = False


def sgd_target(w: Tensor, g: Tensor, m: Tensor, h: Sgd) -> tuple[Tensor, Tensor]:
    """Return the unrounded new weights and the new momentum."""
    m = m * h.momentum + g * (1 - h.momentum)
    return w * (1 - h.lr * h.weight_decay) - m * h.lr, m


def sgd_inject(m: Tensor, error: Tensor, h: Sgd) -> Tensor:
    """Return the momentum that carries the rounding error."""
    factor = 1 - h.lr * h.weight_decay if h.decay_factor else 1.0
    return m + factor / h.inject_lr * (1 - 1 / h.momentum) * error


def sgd_exact_inject(m: Tensor, previous: Tensor, error: Tensor, h: Sgd) -> Tensor:
    """Return the momentum whose trajectory equals master weights', from two steps' errors."""
    now = (1 - h.lr * h.weight_decay) / h.lr
    later = (1 - h.inject_lr * h.weight_decay) / (h.momentum * h.inject_lr)
    return m + now * previous - later * error
