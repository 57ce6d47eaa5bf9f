"""Kernels as custom ops that a compiled graph can hold, called directly where none is made.

PyTorch's dispatcher spends 50 to 200 microseconds on a custom op with a dozen arguments, which is
what a small tensor's kernel takes; a step calls hundreds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire import _compat

__all__ = ["cpu_op"]

_PLAIN = (Tensor, torch.nn.Parameter)


class CpuOp:
    """A custom op `thinwire::name` whose CPU kernel is the function that it was made of."""

    def __init__(self, name: str, function: Callable[..., None], mutates: tuple[str, ...]) -> None:
        self._function = function
        self._op = torch.library.custom_op(
            f"thinwire::{name}", function, mutates_args=mutates, device_types="cpu"
        )
        self.__doc__ = function.__doc__

    def __call__(self, x: Tensor, *args: Any) -> None:
        """Run the kernel of x's device."""
        direct = type(x) in _PLAIN and x.is_cpu and not _compat.is_traced()
        (self._function if direct else self._op)(x, *args)

    def register_kernel(self, device: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that adds another device's kernel."""
        return self._op.register_kernel(device)


def cpu_op(name: str, *mutates: str) -> Callable[[Callable[..., None]], CpuOp]:
    """Return a decorator that makes a CPU kernel the op `thinwire::name`.

    Args:
        name: of the op.
        mutates: arguments that it writes into.
    """
    return lambda function: CpuOp(name, function, mutates)
