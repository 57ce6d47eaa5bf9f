"""Is every value of a tensor finite? Every step asks it of all gradients."""

import torch
from torch import Tensor

__all__ = ["all_finite"]


def all_finite(*tensors: Tensor) -> Tensor:
    """Return whether no value of any tensor is NaN or infinite, as a bool without dimensions.

    On a CPU sums are looked at first, at a tenth of the cost: one is finite only if all its terms
    are. A sum that overflows (or meets infinities of both signs) needs the closer look.
    """
    if all(x.is_cpu and x.is_floating_point() and x.itemsize > 1 for x in tensors):  # FP8 has none
        dtype = torch.float32
        for x in tensors:
            dtype = torch.promote_types(dtype, x.dtype)
        found = torch.isfinite(torch.stack([x.sum(dtype=dtype) for x in tensors])).all()
        if found:
            return found
    return torch.stack([torch.isfinite(x).all() for x in tensors]).all()
