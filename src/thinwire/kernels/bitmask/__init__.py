"""Masks on the wire: packed bits or 12-bit indices, from and to sorted positions."""

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels.bitmask.reference import CHUNK, bits_nbytes, index12_nbytes
from thinwire.kernels.parallel import array, backend

__all__ = ["bits_nbytes", "from_bits", "from_index12", "index12_nbytes", "to_bits", "to_index12"]

_PACKAGE = "thinwire.kernels.bitmask"


def to_bits(index: Tensor, numel: int, out: Tensor) -> None:
    """Write positions int64 [K], ascending, as bits into uint8 out [ceil(numel/8)]."""
    if index.device.type == "cuda":
        backend(_PACKAGE, "triton").to_bits(index, numel, out)
    else:
        backend(_PACKAGE, "cpu").to_bits(array(index), array(out))


def from_bits(wire: Tensor, numel: int, k: int) -> Tensor:
    """Return positions int64 [k] of a bit form.

    Raises:
        WireError: another number of bits is set, or one beyond numel.
    """
    if wire.device.type == "cuda":
        found: Tensor = backend(_PACKAGE, "triton").from_bits(wire, numel, k)
        return found
    index = torch.empty(k, dtype=torch.int64)
    if backend(_PACKAGE, "cpu").from_bits(array(wire), numel, array(index)) != k:
        raise WireError(f"a bit mask of {numel} elements must have exactly {k} of them set")
    return index


def to_index12(index: Tensor, numel: int, out: Tensor) -> None:
    """Write positions int64 [K], ascending, as 12-bit indices into out [index12_nbytes]."""
    if index.device.type == "cuda":
        backend(_PACKAGE, "triton").to_index12(index, numel, out)
    else:
        backend(_PACKAGE, "cpu").to_index12(array(index), -(-numel // CHUNK), array(out))


def from_index12(wire: Tensor, numel: int, k: int) -> Tensor:
    """Return positions int64 [k] of an index form.

    Raises:
        WireError: counts that do not add up, or positions out of order or beyond numel.
    """
    if wire.device.type == "cuda":
        listed: Tensor = backend(_PACKAGE, "triton").from_index12(wire, numel, k)
        return listed
    index = torch.empty(k, dtype=torch.int64)
    chunks = -(-numel // CHUNK)
    if not backend(_PACKAGE, "cpu").from_index12(array(wire), chunks, numel, array(index)):
        raise WireError(f"an index mask of {numel} elements does not hold {k} ascending positions")
    return index
