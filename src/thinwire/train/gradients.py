"""What happens to gradients between backward and the optimizer: replica average, norm, clipping.

The norm counts each element of the whole model once: a rank's sum of squares is divided by the
number of ranks that hold the same elements, then summed over all ranks in float64.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thinwire import comm
from thinwire.comm import Ledger
from thinwire.train.mesh import Layout

__all__ = ["average_over_replicas", "local_square_norm", "scale_gradients"]

BUCKET_BYTES = 25 * 2**20  # DDP's default


def average_over_replicas(params: Iterable[nn.Parameter], layout: Layout, ledger: Ledger) -> None:
    """All-reduce the local gradients over `dp_replicate` in flat buckets and divide.

    Parameters without a gradient (unused this step) count as zero, so that ranks agree on sizes.
    """
    num_replicas = layout.sizes["dp_replicate"]
    if num_replicas == 1:
        return
    for bucket in _buckets(params):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        total = comm.all_reduce(
            flat, None, group=layout.group("dp_replicate"), link="gradients", ledger=ledger
        )
        total /= num_replicas
        for g, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
            g.copy_(part.view_as(g))


def local_square_norm(params: Iterable[nn.Parameter], layout: Layout) -> Tensor:
    """Return this rank's part of the squared global norm, float64, to be summed over the world."""
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    for p in params:
        if p.grad is not None:
            copies = _copies(p, layout)
            total += local(p.grad).double().square().sum() / copies
    return total


def scale_gradients(params: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all local gradients by `factor`."""
    grads = [local(p.grad) for p in params if p.grad is not None]
    torch._foreach_mul_(grads, factor)


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, a plain tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _copies(p: nn.Parameter, layout: Layout) -> int:
    """Return how many ranks hold the very elements that this rank holds of p."""
    copies = layout.sizes["dp_replicate"] * layout.sizes["dp_shard"] * layout.sizes["tp"]
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        for dim, placement in enumerate(p.placements):
            if not isinstance(placement, Replicate):
                copies //= mesh.size(dim)
    return copies


def _buckets(params: Iterable[nn.Parameter]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    nbytes = 0
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grad = local(p.grad)
        if bucket and (nbytes + grad.nbytes > BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(grad)
        nbytes += grad.nbytes
    if bucket:
        yield bucket
