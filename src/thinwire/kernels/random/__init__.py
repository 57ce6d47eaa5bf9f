"""Counter-based random numbers (Philox-4x32-10), equal on every device."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.parallel import array, backend, run
from thinwire.kernels.random import reference

__all__ = ["RandomKey", "tensor_id", "uniform"]

_BLOCK = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomKey:
    """Where a stream of uniforms starts: equal keys give equal numbers on every rank and device.

    Attributes:
        run_key: 64-bit key of the run.
        tensor: 32-bit id of the tensor (`tensor_id` of its name).
        step: optimizer step, 0 to 2^32 - 1.
        offset: flat index, in the full tensor, of the first element of a shard.
    """

    run_key: int = 0
    tensor: int = 0
    step: int = 0
    offset: int = 0

    @property
    def words(self) -> tuple[int, int, int, int]:
        """Return (key as a signed 64-bit integer, tensor, step, offset) for a kernel."""
        key = self.run_key & (2**64 - 1)
        return key - 2**64 if key >= 2**63 else key, self.tensor, self.step, self.offset


def tensor_id(name: str) -> int:
    """Return the first 4 bytes of SHA-256 of a parameter's name, little-endian."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def kernel_words(key: int, tensor: int, step: int) -> tuple[np.uint64, np.uint32, np.uint32]:
    """Return the stream's words in the types that CPU kernels take."""
    mask = 0xFFFFFFFF
    return np.uint64(key & (2**64 - 1)), np.uint32(tensor & mask), np.uint32(step & mask)


def uniform(numel: int, key: RandomKey, device: torch.device | None = None) -> Tensor:
    """Return fp32 uniforms in [0, 1) for flat indices offset .. offset + numel - 1."""
    run_key, tensor, step, offset = key.words
    if device is not None and device.type == "cuda":
        drawn = torch.empty(numel, device=device)
        backend("thinwire.kernels.random", "triton").uniform(drawn, run_key, tensor, step, offset)
        return drawn
    if device is not None and device.type != "cpu":
        index = torch.arange(offset, offset + numel, device=device)
        return reference.uniform(index, run_key, tensor, step)
    u = torch.empty(numel)
    blocks = -(-numel // _BLOCK)
    kernel = backend("thinwire.kernels.random", "cpu").uniform
    run(kernel, blocks, numel, array(u), _BLOCK, offset, *kernel_words(run_key, tensor, step))
    return u
