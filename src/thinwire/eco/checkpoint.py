"""Quantized parameters as plain tensors, for torch's distributed checkpoint and for comparisons.

The entry of a quantized parameter `name` becomes `name.codes`, `name.scales`, `name.format` (text)
and, if it has one, `name.master`: tensors of the whole parameter, sharded as it is, so that a
checkpoint opens on any number of ranks. The tensors are views of the live storage.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thinwire.comm import Ledger
from thinwire.comm.ledger import all_gather_sent
from thinwire.eco.placement import local_like, plain
from thinwire.eco.tensor import QuantizedTensor, local_quantized
from thinwire.errors import CheckpointError, ContractError

__all__ = ["check_replicas", "load_plain_state_dict", "plain_state_dict", "weight_nbytes"]


def plain_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state dict with plain tensors in place of quantized ones.

    Example:
        >>> dcp.save(tw.eco.plain_state_dict(model.state_dict()), checkpoint_id=path)
    """
    out: dict[str, Any] = {}
    for name, value in state.items():
        quantized = local_quantized(value) if torch.is_tensor(value) else None
        if quantized is None:
            out[name] = value
            continue
        out |= {f"{name}.{part}": x for part, x in _parts(value, quantized).items()}
    return out


def _parts(param: Tensor, quantized: QuantizedTensor) -> dict[str, Any]:
    stored = quantized.stored
    lead = tuple(param.shape[: stored.lead_dims])
    pieces = param.numel() // max(1, _numel(lead))  # columns of the whole
    ratio = pieces // max(1, quantized.blocks.columns)
    parts: dict[str, Any] = {
        "format": str(stored.format),
        "codes": local_like(param, quantized.codes, (*lead, quantized.codes.shape[-1] * ratio)),
    }
    if stored.format.shared_scale(stored.lead_dims):
        # One value that all ranks hold alike.
        parts["scales"] = _replicated(param, quantized.scales)
    elif stored.format.has_scales:
        whole = {"row": lead, "tensor": lead[:-1]}.get(stored.format.granularity)
        if whole is None:
            whole = (*lead, quantized.scales.shape[-1] * ratio)
        parts["scales"] = local_like(param, quantized.scales, whole)
    if quantized.master is not None:
        parts["master"] = local_like(param, quantized.master)
    return parts


def _replicated(param: Tensor, local: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    placements = [Replicate()] * param.device_mesh.ndim
    return DTensor.from_local(local, param.device_mesh, placements, run_check=False)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@torch.no_grad()
def load_plain_state_dict(model: nn.Module, flat: Mapping[str, Any]) -> None:
    """Put what `plain_state_dict` gave (and a checkpoint loaded) into a model, bit for bit.

    Raises:
        CheckpointError: missing entries, another storage format, other shapes or dtypes.
    """
    state = model.state_dict()
    mine = plain_state_dict(state)
    missing = sorted(mine.keys() - flat.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:5])}")
    for name, target in mine.items():
        value = flat[name]
        if isinstance(target, str):
            if value != target:
                raise CheckpointError(
                    f"parameter {name.removesuffix('.format')!r} was saved as {value}, the model "
                    f"stores it as {target}: quantize_ with the saved format"
                )
            continue
        if not torch.is_tensor(target):
            continue
        if value.dtype != target.dtype or value.shape != target.shape:
            raise CheckpointError(
                f"saved {name} is {value.dtype} {tuple(value.shape)}, the model holds "
                f"{target.dtype} {tuple(target.shape)}: nothing is cast on load"
            )
        if plain(value).data_ptr() != plain(target).data_ptr():
            plain(target).copy_(plain(value))


def weight_nbytes(model: nn.Module) -> int:
    """Return the measured bytes of a model's parameters on this rank, each storage counted once."""
    storages: dict[int, int] = {}
    for param in model.parameters():
        quantized = local_quantized(param)
        if quantized is None:
            tensors = [plain(param)]
        else:
            parts = (quantized.codes, quantized.scales, quantized.master)
            tensors = [x for x in parts if x is not None]
        for x in tensors:
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@torch.no_grad()
def check_replicas(
    model: nn.Module, group: dist.ProcessGroup, ledger: Ledger | None = None
) -> None:
    """Compare the parameters of ranks that should hold equal ones; collective.

    Raises:
        ContractError: on all ranks, naming the first parameter that differs.
    """
    names, digests = [], []
    for name, value in plain_state_dict(dict(model.named_parameters())).items():
        if torch.is_tensor(value):
            data = plain(value).contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
            names.append(name)
            digests.append(hashlib.sha256(data).digest()[:8])
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    if ledger is not None:
        sent = all_gather_sent(own.numel(), group.size())
        ledger.book("scalars", dense_bytes=sent, wire_bytes=sent)
    for rank, other in enumerate(every):
        differ = (other != every[0]).view(-1, 8).any(1).nonzero()
        if len(differ):
            raise ContractError(
                f"replicas drifted: {names[int(differ[0])]} of rank {rank} of the group differs "
                "from rank 0's; gradients were not reduced alike, or weights edited on one rank"
            )
