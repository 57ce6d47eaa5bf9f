"""Inputs that every kernel must treat as its reference does, and the comparison."""

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def values(n: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return tensors [n] of each value class."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    classes = {
        "normal": x,
        "small": x * 1e-7,
        "large": x * 1e6,
        "zeros": torch.zeros(n),
        "minus_zeros": -torch.zeros(n),
        "constant": torch.full((n,), 3.3),
        "subnormal": x * 1e-40,
        "outlier": x.clone(),
        "nan": x.clone(),
        "inf": x.clone(),
        "ties": torch.round(x),
    }
    if n:
        classes["outlier"][n // 2] = 3e4
        classes["nan"][n // 2] = NAN
        classes["inf"][n // 3] = -INF
    return {name: v.to(dtype) for name, v in classes.items()}


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit, any NaN equal to any other."""
    return a.dtype == b.dtype and torch.equal(
        a.nan_to_num(12345.0, INF, -INF), b.nan_to_num(12345.0, INF, -INF)
    )
