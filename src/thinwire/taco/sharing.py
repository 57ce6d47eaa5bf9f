"""One region for layers that read the same tensor (q, k, v), found at run time.

A stock plan that names q, k and v alone would reduce three input gradients. The first of them to
run keeps its prepared input here; the others, if they are given the very same tensor, take it. Its
partial gradients then add up on each rank before the one reduction. When the parent's forward
ends, nothing is kept.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["SharedInput"]


class SharedInput:
    """The prepared input that the column-parallel children of one parent share."""

    def __init__(self, parent: nn.Module) -> None:
        self._source: Tensor | None = None
        self._prepared: DTensor | None = None
        self._grad = False
        parent.register_forward_hook(self._clear, always_call=True)

    def find(self, x: Tensor) -> DTensor | None:
        """Return what `keep` stored for x, None for another tensor or grad mode."""
        same = self._source is x and self._grad == torch.is_grad_enabled()
        return self._prepared if same else None

    def keep(self, x: Tensor, prepared: DTensor) -> DTensor:
        """Store the prepared form of x and return it."""
        self._source, self._prepared, self._grad = x, prepared, torch.is_grad_enabled()
        return prepared

    def _clear(self, module: nn.Module, args: Any, output: Any) -> None:
        self._source = self._prepared = None
