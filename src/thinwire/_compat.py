"""The only file that touches torch names which are private or differ between 2.11 and 2.14.

`tests/unit/test_compat.py` holds one test per name, so that a torch upgrade fails here first.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree

__all__ = [
    "AllGather",
    "ReduceScatter",
    "all_gather_single",
    "default_group",
    "from_local_partial_grad",
    "fsdp_param_data",
    "fsdp_params",
    "group_from_name",
    "group_timeout",
    "is_resharded_to_subgroup",
    "is_sharded",
    "keep_version",
    "keeps_unsharded_after_forward",
    "map_tensors",
    "no_torch_function",
    "num_groups",
    "reduce_scatter_single",
    "shard_group",
    "takes_cuda_only",
    "torch_version",
    "wrapper_tensor",
]

# 2.13 renamed the flat collectives and warns on the old names, which 2.11 has alone.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_group() -> dist.ProcessGroup:
    """Return the world group."""
    return distributed_c10d._get_default_group()


def num_groups() -> int:
    """Return how many groups this rank has made, which names the next locally made one."""
    return len(distributed_c10d._world.pg_names)


def group_from_name(name: str) -> dist.ProcessGroup:
    """Return the process group that `ProcessGroup.group_name` named."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def takes_cuda_only(group: dist.ProcessGroup) -> bool:
    """Return whether the group's backends (NCCL alone, say) refuse tensors in host memory."""
    return {device.type for device in group._device_types} == {"cuda"}


def _fsdp_group(module: FSDPModule) -> Any | None:
    """Return the module's parameter group, None if it has none; ValueError if it has several."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 holds one group or None
        return state._fsdp_param_group
    if len(groups) > 1:
        raise ValueError("several parameter groups")
    return groups[0] if groups else None


def fsdp_params(module: FSDPModule) -> list[Any]:
    """Return the module's FSDPParams in the order of its flat gather buffer."""
    group = _fsdp_group(module)
    return [] if group is None else list(group.fsdp_params)


def fsdp_param_data(fsdp_param: Any) -> Tensor:
    """Return the flat, padded local shard of one FSDPParam in its original dtype."""
    return fsdp_param._sharded_param_data


def is_sharded(fsdp_param: Any) -> bool:
    """Return whether the parameter lies sharded over the whole shard group right now."""
    return fsdp_param.sharded_state.name == "SHARDED"


def is_resharded_to_subgroup(fsdp_param: Any) -> bool:
    """Return whether an integer reshard_after_forward holds the parameter in smaller shards."""
    return fsdp_param.sharded_state.name == "SHARDED_POST_FORWARD"


def keeps_unsharded_after_forward(module: FSDPModule) -> bool:
    """Return whether backward needs no second gather (reshard_after_forward=False)."""
    group = _fsdp_group(module)
    return group is None or group.post_forward_mesh_info is None


def shard_group(module: FSDPModule) -> dist.ProcessGroup | None:
    """Return the process group that the module's weights are sharded over."""
    group = _fsdp_group(module)
    return None if group is None else group.mesh_info.shard_process_group


class _FromLocalPartialGrad(torch.autograd.Function):
    """What `DTensor.from_local(grad_placements=[Partial()])` does, for torch 2.11."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        if not grad.placements[0].is_partial():
            grad = grad.redistribute(ctx.mesh, [Partial()])
        return grad.to_local(), None


_HAS_GRAD_PLACEMENTS = "grad_placements" in inspect.signature(DTensor.from_local).parameters


def from_local_partial_grad(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return x as a replicated DTensor whose gradient reaches x as this rank's partial sum."""
    if not _HAS_GRAD_PLACEMENTS:
        return _FromLocalPartialGrad.apply(x, mesh)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False, grad_placements=[Partial()])


def torch_version() -> tuple[int, int]:
    """Return torch's (major, minor)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_traced() -> bool:
    """Return whether operations are recorded or transformed: compile, make_fx, modes, functorch."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def wrapper_tensor(
    cls: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of subclass `cls` that shows this shape and dtype and holds no data."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)


def no_torch_function() -> AbstractContextManager[None]:
    """Return a context in which subclasses' `__torch_function__` isn't called."""
    return torch._C.DisableTorchFunctionSubclass()


def keep_version(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to `tensor` don't invalidate what autograd saved."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def map_tensors(cls: type, fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested arguments with `fn` applied to the values of type `cls`."""
    return _pytree.tree_map_only(cls, fn, tree)


@contextmanager
def group_timeout(groups: Sequence[dist.ProcessGroup], seconds: float) -> Iterator[None]:
    """Let collectives of gloo and NCCL groups fail after `seconds` inside the block."""
    before = []
    for group in groups:
        backends = {group._get_backend(device) for device in group._device_types}
        known = [b for b in backends if hasattr(b, "_set_default_timeout") and _has_timeout(b)]
        before += [(backend, backend.options._timeout) for backend in known]
    try:
        for backend, _ in before:
            backend._set_default_timeout(timedelta(seconds=seconds))
        yield
    finally:
        for backend, timeout in before:
            backend._set_default_timeout(timeout)


def _has_timeout(backend: Any) -> bool:
    return isinstance(getattr(getattr(backend, "options", None), "_timeout", None), timedelta)
