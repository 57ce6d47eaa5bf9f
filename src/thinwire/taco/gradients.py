"""Gradients of the parameters that sequence-parallel modules hold whole on every rank."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from thinwire import comm
from thinwire.comm.ledger import Ledger
from thinwire.taco.link import LINK

__all__ = ["sum_partial_gradients"]

REASON = "replicated parameters: their gradients are summed exactly, once per step"


def sum_partial_gradients(params: Iterable[Tensor], *, ledger: Ledger | None = None) -> None:
    """Sum the partial gradients that a backward pass left, in one all-reduce per mesh and dtype.

    A norm on a piece of the sequence leaves each rank a part of its weight's gradient, which
    torch sums whenever an operation needs the whole, possibly several times a step and unseen.
    Call this once, after the last backward of a step: gradients are whole from then on.

    Args:
        params: parameters; those without a partial DTensor gradient are passed over.
        ledger: books the bytes, as exempt.
    """
    families: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for p in params:
        grad = p.grad
        if not isinstance(grad, DTensor) or grad.device_mesh.ndim > 1:
            continue
        if grad.placements[0].is_partial():
            families.setdefault((id(grad.device_mesh), grad.dtype), []).append(p)
    for family in families.values():
        _sum_family(family, ledger)


def _sum_family(params: list[Tensor], ledger: Ledger | None) -> None:
    grads: list[DTensor] = [p.grad for p in params]  # type: ignore[misc]
    mesh, sizes = grads[0].device_mesh, [g.numel() for g in grads]
    flat = torch.cat([g.to_local().reshape(-1) for g in grads])
    total = comm.all_reduce(
        flat, None, group=mesh.get_group(), link=LINK, ledger=ledger, exempt=REASON
    )
    for p, g, part in zip(params, grads, total.split(sizes), strict=True):
        p.grad = DTensor.from_local(
            part.view(g.shape),
            mesh,
            [Replicate()],
            run_check=False,
            shape=g.shape,
            stride=g.stride(),
        )
