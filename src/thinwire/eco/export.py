"""A model's whole weights in full precision, from quantized and sharded parameters alike."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.eco.checkpoint import plain_state_dict
from thinwire.eco.placement import plain
from thinwire.eco.rounding import decode
from thinwire.eco.tensor import local_quantized

__all__ = ["dense_state_dict"]


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
        parts = {k.rsplit(".", 1)[1]: v for k, v in plain_state_dict({name: value}).items()}
        stored, shape = quantized.stored, tuple(value.shape)
        blocks = stored.format.blocks(shape, stored.lead_dims)
        codes = _whole(parts["codes"]).view(blocks.rows, -1)
        scales = _whole(parts["scales"]).view(-1) if "scales" in parts else codes.new_empty(0)
        values = decode(codes, scales, stored.format, blocks)
        dense[name] = values.view(shape).to(quantized.dtype)
    return dense


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor().detach() if isinstance(x, DTensor) else plain(x).clone()
