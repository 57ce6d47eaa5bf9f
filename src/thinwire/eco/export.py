"""Whole weights in full precision, out of and into quantized and sharded parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thinwire.eco.checkpoint import plain_state_dict
from thinwire.eco.formats import Blocks
from thinwire.eco.placement import plain
from thinwire.eco.rounding import decode, encode
from thinwire.eco.tensor import QuantizedTensor, local_quantized
from thinwire.errors import ConfigError

__all__ = ["dense_state_dict", "place_whole", "rounded", "whole_values"]


@torch.no_grad()
def dense_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer whole, as a plain tensor of its own dtype.

    A collective where parameters are sharded. Quantized weights give the values that the model
    computes with; a master copy is left out.
    """
    dense: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        quantized = local_quantized(value) if torch.is_tensor(value) else None
        if quantized is None:
            if torch.is_tensor(value):
                dense[name] = _whole(value)
            continue
        dense[name] = whole_values(value)
    return dense


@torch.no_grad()
def whole_values(param: Tensor) -> Tensor:
    """Return a quantized parameter's values, whole, in its dtype; collective where it is sharded.

    Raises:
        ConfigError: the parameter isn't quantized.
    """
    quantized, parts = _parts(param)
    stored, blocks = quantized.stored, _blocks(param, quantized)
    codes = _whole(parts["codes"]).view(blocks.rows, -1)
    scales = _whole(parts["scales"]).view(-1) if "scales" in parts else codes.new_empty(0)
    values = decode(codes, scales, stored.format, blocks)
    return values.view(param.shape).to(quantized.dtype)


@torch.no_grad()
def rounded(param: Tensor, values: Tensor) -> Tensor:
    """Return what `place_whole` would make of whole values, in the parameter's dtype."""
    quantized, _ = _parts(param)
    fmt, blocks = quantized.stored.format, _blocks(param, quantized)
    codes, scales = encode(values.float().reshape(blocks.rows, blocks.columns), fmt, blocks, None)
    return decode(codes, scales, fmt, blocks).view(param.shape).to(quantized.dtype)


@torch.no_grad()
def place_whole(param: Tensor, values: Tensor) -> None:
    """Put whole values into a quantized parameter, rounded to nearest; each rank keeps its piece.

    Codes and scales are a function of the values, not of the ranks.

    Args:
        param: a parameter of `quantize_`, sharded or not.
        values: of the whole parameter, the same on every rank.

    Raises:
        ConfigError: the parameter isn't quantized, or keeps a master copy.
    """
    quantized, parts = _parts(param)
    stored, blocks = quantized.stored, _blocks(param, quantized)
    if quantized.master is not None:
        raise ConfigError(
            f"parameter {stored.name!r} keeps a master copy, which whole values cannot be put into"
        )
    matrix = values.float().reshape(blocks.rows, blocks.columns)
    codes, scales = encode(matrix, stored.format, blocks, None)
    for name, whole in (("codes", codes), ("scales", scales)):
        if name in parts:
            _put(parts[name], whole.view(parts[name].shape))


def _parts(param: Tensor) -> tuple[QuantizedTensor, dict[str, Any]]:
    quantized = local_quantized(param)
    if quantized is None:
        raise ConfigError("the parameter is not stored quantized")
    named = plain_state_dict({"p": param})
    return quantized, {k.rsplit(".", 1)[1]: v for k, v in named.items()}


def _blocks(param: Tensor, quantized: QuantizedTensor) -> Blocks:
    stored = quantized.stored
    return stored.format.blocks(tuple(param.shape), stored.lead_dims)


def _put(piece: Tensor, whole: Tensor) -> None:
    """Copy this rank's piece of a whole tensor into the live storage behind `piece`."""
    if isinstance(piece, DTensor):
        same = [Replicate()] * piece.device_mesh.ndim
        spread = DTensor.from_local(whole, piece.device_mesh, same, run_check=False)
        whole = spread.redistribute(placements=piece.placements).to_local()
    plain(piece).copy_(whole)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor().detach() if isinstance(x, DTensor) else plain(x).clone()
