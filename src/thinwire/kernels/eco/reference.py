"""ECO's quantizer and optimizer step in plain torch: the specification of the fused kernels.

Legend: `R` rows (dim 0), `C` columns (the rest), `S` scales, `N` = R*C.

    scale = max(max|x| / rho, 2^-100) over the elements that share it, 1 where all are 0
    y = clip(x / scale, -rho, rho);  q = round(y) on the format's grid;  x^ = q*scale

Step (th^ dequantized weights, m and v moments, g gradient; all fp32, or all fp64 as an oracle):

    Adam:  m~ = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  den = sqrt(v/c2) + eps
           th~ = (1 - lr*wd)*th^ - lr*(m~/c1)/den
    SGD:   m~ = b1*m + (1-b1)*g;  den = 1;  th~ = (1 - lr*wd)*th^ - lr*m~
    both:  th^' = q(th~);  e = th~ - th^';  m' = m~ + (inject*den)*e

The constant `inject` is (c1/lr)*(1 - 1/b1), negative; 0 drops the error (the naive arm).

Reference: Nikdan et al., "ECO", arXiv 2601.22101; stochastic rounding on FP8's true spacing,
scale floors and storage are thinwire's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.rounding import sqrt

__all__ = [
    "RHO",
    "Quantizer",
    "Step",
    "absmax",
    "adam_update",
    "code_columns",
    "dequantize",
    "inject",
    "num_scales",
    "quantize",
    "quantize_with",
    "round_to_grid",
    "scale_of",
    "sgd_update",
    "step",
    "stochastic_bf16",
]

RHO = {"fp8_e4m3": 448.0, "int8": 127.0, "int4": 7.0}
_SCALE_FLOOR = 2.0**-100


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A storage format. `group`: elements of a row that share a scale; 0: the row; -1: all."""

    fmt: str
    group: int = 0
    pow2_scale: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step's constants; `c1, c2` are 1 - beta^t, `inject` the error's coefficient."""

    lr: float
    b1: float
    b2: float = 0.0
    eps: float = 0.0
    c1: float = 1.0
    c2: float = 1.0
    weight_decay: float = 0.0
    inject: float = 0.0
    adam: bool = True

    @property
    def decay(self) -> float:
        """Return the factor of decoupled weight decay."""
        return 1.0 - self.lr * self.weight_decay


def code_columns(columns: int, fmt: str) -> int:
    """Return the bytes of one row of codes."""
    return (columns + 1) // 2 if fmt == "int4" else columns


def _groups(columns: int, group: int) -> tuple[int, int]:
    """Return (scales per row, elements per scale)."""
    size = group if group > 0 else max(columns, 1)
    return -(-columns // size), size


def num_scales(rows: int, columns: int, group: int) -> int:
    """Return S."""
    return 1 if group < 0 else rows * max(_groups(columns, group)[0], 1)


def absmax(x_RC: Tensor, group: int) -> Tensor:
    """Return the largest magnitude [S] over the elements that share a scale (NaN stays NaN)."""
    rows, columns = x_RC.shape
    if x_RC.numel() == 0:
        return x_RC.new_zeros(num_scales(rows, columns, group))
    if group < 0:
        return x_RC.abs().amax().view(1)
    count, size = _groups(columns, group)
    padded = torch.nn.functional.pad(x_RC.abs(), (0, count * size - columns))
    return padded.view(rows * count, size).amax(1)


def scale_of(absmax_S: Tensor, rho: float, pow2_scale: bool) -> Tensor:
    """Return the scales [S] of these magnitudes."""
    scale = (absmax_S / absmax_S.new_tensor(rho)).clamp_min(_SCALE_FLOOR)
    if pow2_scale:
        mantissa, exponent = torch.frexp(scale)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(absmax_S == 0, torch.ones_like(scale), scale)


def _expand(scale_S: Tensor, rows: int, columns: int, group: int) -> Tensor:
    """Return the scale of every element [R, C] (or broadcastable to it)."""
    if group < 0:
        return scale_S.view(1, 1)
    count, size = _groups(columns, group)
    return scale_S.view(rows, max(count, 1)).repeat_interleave(size, 1)[:, :columns]


def round_to_grid(y: Tensor, fmt: str, u: Tensor | None) -> Tensor:
    """Return y, within [-rho, rho], rounded to the grid: to nearest even, or with uniforms u."""
    if fmt != "fp8_e4m3":
        rho = RHO[fmt]
        return torch.round(y) if u is None else torch.floor(y + u).clamp(-rho, rho)
    exponent = (torch.frexp(y)[1] - 1).clamp_min(-6) - 3
    a = torch.ldexp(y.abs(), -exponent)  # in units of the spacing: exact
    k = torch.round(a) if u is None else torch.floor(a)
    if u is not None:
        k = k + (u < a - k).to(k.dtype)
    return torch.copysign(torch.ldexp(k, exponent), y)


def _to_codes(q_RC: Tensor, fmt: str) -> Tensor:
    if fmt == "fp8_e4m3":
        return q_RC.float().to(torch.float8_e4m3fn).view(torch.uint8)
    if fmt == "int8":
        return q_RC.to(torch.int8).view(torch.uint8)
    nibbles = torch.nn.functional.pad(q_RC, (0, q_RC.shape[1] % 2)) + 8
    nibbles = nibbles.to(torch.uint8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def _from_codes(codes: Tensor, columns: int, fmt: str) -> Tensor:
    if fmt == "fp8_e4m3":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if fmt == "int8":
        return codes.contiguous().view(torch.int8).float()
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, :columns].float() - 8


def quantize_with(
    x_RC: Tensor, scale_S: Tensor, quantizer: Quantizer, u: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 and the dequantized values [R, C] for given scales."""
    rho = RHO[quantizer.fmt]
    rows, columns = x_RC.shape
    scale = _expand(scale_S, rows, columns, quantizer.group)
    q = round_to_grid((x_RC / scale).clamp(-rho, rho), quantizer.fmt, u)
    return _to_codes(q, quantizer.fmt), q * scale


def quantize(x_RC: Tensor, quantizer: Quantizer, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [R, code_columns] and scales fp32 [S] of a finite fp32 [R, C]."""
    magnitude = absmax(x_RC, quantizer.group)
    scale = scale_of(magnitude, RHO[quantizer.fmt], quantizer.pow2_scale)
    return quantize_with(x_RC, scale, quantizer, u)[0], scale


def dequantize(codes: Tensor, scale_S: Tensor, columns: int, quantizer: Quantizer) -> Tensor:
    """Return fp32 [R, C]."""
    q = _from_codes(codes, columns, quantizer.fmt)
    return q * _expand(scale_S, codes.shape[0], columns, quantizer.group)


def adam_update(
    theta: Tensor, m: Tensor, v: Tensor, g: Tensor, h: Step
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return th~, m~, v and den of an AdamW step from dequantized weights."""
    m = h.b1 * m + (1 - h.b1) * g
    v = h.b2 * v + (1 - h.b2) * (g * g)
    den = sqrt(v / v.new_tensor(h.c2)) + h.eps
    theta = h.decay * theta - (h.lr * (m / m.new_tensor(h.c1))) / den
    return theta, m, v, den


def sgd_update(theta: Tensor, m: Tensor, g: Tensor, h: Step) -> tuple[Tensor, Tensor]:
    """Return th~ and m~ of a momentum SGD step."""
    m = h.b1 * m + (1 - h.b1) * g
    return h.decay * theta - h.lr * m, m


def inject(m: Tensor, error: Tensor, den: Tensor | float, h: Step) -> Tensor:
    """Return m' = m~ + (inject*den)*e."""
    return m + (h.inject * den) * error if h.inject else m


def _temporary(
    codes: Tensor, scales: Tensor, g: Tensor, m: Tensor, v: Tensor | None, q: Quantizer, h: Step
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | float]:
    theta = dequantize(codes, scales, g.shape[1], q)
    if v is None:
        theta, new_m = sgd_update(theta, m.float(), g.float(), h)
        return theta, new_m, None, 1.0
    return adam_update(theta, m.float(), v.float(), g.float(), h)


def step_absmax(
    codes: Tensor, scales: Tensor, g: Tensor, m: Tensor, v: Tensor | None, q: Quantizer, h: Step
) -> Tensor:
    """Return the magnitudes [S] of th~, changing nothing."""
    return absmax(_temporary(codes, scales, g, m, v, q, h)[0], q.group)


def step(
    codes: Tensor,
    scales: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor | None,
    quantizer: Quantizer,
    h: Step,
    u: Tensor | None,
    magnitude: Tensor | None = None,
) -> int:
    """Take one step in place; return how many scales were left alone for a non-finite th~.

    Args:
        codes: uint8 [R, code_columns].
        scales: fp32 [S].
        g: gradient [R, C], fp32, bf16 or fp16.
        m: first moments [R, C], fp32 or bf16.
        v: second moments, likewise; None for SGD.
        quantizer: format and granularity.
        h: the step's constants.
        u: uniforms [R, C] for stochastic rounding, or None.
        magnitude: None, or the magnitudes [S] agreed over the ranks that share them.
    """
    theta, new_m, new_v, den = _temporary(codes, scales, g, m, v, quantizer, h)
    if magnitude is None:
        magnitude = absmax(theta, quantizer.group)
    bad_S = ~torch.isfinite(magnitude)
    scale = scale_of(magnitude.masked_fill(bad_S, 0.0), RHO[quantizer.fmt], quantizer.pow2_scale)
    bad = _expand(bad_S, theta.shape[0], theta.shape[1], quantizer.group).expand_as(theta)
    theta = theta.masked_fill(bad, 0.0)
    new_codes, new_theta = quantize_with(theta, scale, quantizer, u)
    new_m = inject(new_m, theta - new_theta, den, h)
    m.copy_(torch.where(bad, m.float(), new_m))
    if v is not None and new_v is not None:
        v.copy_(torch.where(bad, v.float(), new_v))
    bad_codes = bad[:, ::2] if quantizer.fmt == "int4" else bad
    codes.copy_(torch.where(bad_codes, codes, new_codes))
    scales.copy_(torch.where(bad_S, scales, scale))
    return int(bad_S.sum())


def stochastic_bf16(x: Tensor, word: Tensor) -> Tensor:
    """Round fp32 to bf16 by adding `word >> 16` (int64 words in [0, 2^32)) to its bits."""
    bits = x.view(torch.int32).long() + (word >> 16)
    rounded = ((bits >> 16) << 16).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)
