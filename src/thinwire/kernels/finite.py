"""Is every value of a tensor finite? Every step asks it of all gradients."""

import torch
from torch import Tensor

__all__ = ["all_finite"]


def all_finite(x: Tensor) -> Tensor:
    """Return whether no value of x is NaN or infinite, as a bool tensor without dimensions.

    On a CPU the sum is looked at first, at a tenth of the cost: it is finite only if all terms are.
    A sum that overflows (or meets infinities of both signs) needs the closer look.
    """
    if x.is_cpu and x.is_floating_point() and x.itemsize > 1:  # FP8 has no sum
        found = torch.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)))
        if found:
            return found
    return torch.isfinite(x).all()
