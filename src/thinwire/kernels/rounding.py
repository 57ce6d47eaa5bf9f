"""Correctly rounded operations for references, where torch's own may be off by one bit."""

import torch
from torch import Tensor

__all__ = ["sqrt"]


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 or fp64.

    torch's CPU kernel may call a vector library whose fp32 root is off in the last place; fused
    kernels use the IEEE instruction. Through fp64 the fp32 result is exact.
    """
    return x.double().sqrt().float() if x.dtype == torch.float32 else x.sqrt()
