"""Run compiled loops on CPU threads: lazy compilation, a disk cache, and a thread pool of its own.

Kernels are Numba functions that release the GIL and work on a range of blocks. The pool below
splits the range over `torch.get_num_threads()` threads. Numba's own parallel runtime is not used:
its default layer may not be entered from two Python threads at once, and ranks often are threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError

__all__ = [
    "DTYPE_CODES",
    "SERIAL_ELEMENTS",
    "array",
    "backend",
    "flat_rows",
    "inline",
    "jit",
    "run",
]

# Below this many elements a launch on the pool costs more than it saves.
SERIAL_ELEMENTS = 32768

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_pool: ThreadPoolExecutor | None = None


def backend(package: str, name: str) -> ModuleType:
    """Import `package.name` ("cpu" or "triton") on first use, so that start-up loads neither.

    Raises:
        ConfigError: Numba or Triton, which the back end needs, is not installed.
    """
    try:
        return import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "triton"):
            raise
        raise ConfigError(
            f"the {name} kernels of {package} need the package {error.name!r}: "
            f"pip install {error.name}"
        ) from error


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    numba = import_module("numba")
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, **options}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return numba.njit(**options)(function)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a loop over blocks `function(start, stop, ...)` on first call, cached on disk.

    No fast-math and no contraction: results equal the plain torch reference bit for bit.
    """
    return _compile(function)


def inline(function: Callable[..., Any]) -> Any:
    """Compile a helper that is inlined into the loops that call it."""
    return _compile(function, forceinline=True)


def array(x: Tensor) -> np.ndarray:
    """Return a view of a CPU tensor as numpy; bf16 and fp16 as their 16-bit patterns."""
    x = x.detach()
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.view(torch.uint16)
    return x.numpy()


def flat_rows(x_RN: Tensor) -> tuple[np.ndarray, int, int]:
    """Return rows with stride 1 inside as one flat array, the row stride and the number of rows.

    One array type serves contiguous and strided rows, so that a kernel is compiled once.
    """
    rows, length = x_RN.shape
    if rows == 0 or length == 0:
        return array(x_RN.reshape(-1)), 0, rows
    stride = x_RN.stride(0) if rows > 1 else 0
    return array(x_RN.as_strided(((rows - 1) * stride + length,), (1,))), stride, rows


def _reset_pool() -> None:
    # Threads do not survive fork: a child starts its own pool.
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_reset_pool)


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="thinwire")
    return _pool


def run(kernel: Callable[..., Any], blocks: int, elements: int, *args: Any) -> list[Any]:
    """Call `kernel(start, stop, *args)` over the range 0..blocks, split over torch's threads.

    Args:
        kernel: a `jit` function whose ranges can run in any order.
        blocks: length of the range.
        elements: work in the range, to decide whether threads pay.
        args: passed on to each call.

    Returns:
        What the calls returned, in order of their ranges.
    """
    parts = min(torch.get_num_threads(), blocks) if elements >= SERIAL_ELEMENTS else 1
    if parts <= 1:
        return [kernel(0, blocks, *args)]
    cuts = [blocks * i // parts for i in range(parts + 1)]
    pool = _threads()
    futures = [pool.submit(kernel, cuts[i], cuts[i + 1], *args) for i in range(1, parts)]
    results = [kernel(cuts[0], cuts[1], *args)]
    for i, future in enumerate(futures, start=1):
        results.append(_finish(future, kernel, cuts[i], cuts[i + 1], args))
    return results


def _finish(
    future: Future[Any], kernel: Callable[..., Any], start: int, stop: int, args: tuple[Any, ...]
) -> Any:
    # A part that no thread has taken yet (the pool serves other ranks) is done here.
    return kernel(start, stop, *args) if future.cancel() else future.result()
