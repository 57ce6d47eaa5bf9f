"""What happens to gradients between backward and the optimizer: replica average, norm, clipping.

The norm counts each element of the whole model once: a rank's sum of squares is divided by the
number of ranks that hold the same elements, then summed over all ranks in float64.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thinwire.comm import Ledger
from thinwire.comm.ledger import all_reduce_sent
from thinwire.train.mesh import Layout

__all__ = ["ReplicaSync", "deal", "local_square_norm", "scale_gradients"]

BUCKET_BYTES = 25 * 2**20  # DDP's default


class ReplicaSync:
    """Average gradients over `dp_replicate`, overlapped with backward where the pass allows it.

    1. Parameters, last first, are dealt into flat buckets of about 25 MiB.
    2. While `armed`, a bucket whose gradients are all there is launched, but never before the
       buckets in front of it: every rank launches in the same order.
    3. `finish` launches the rest, waits, divides and writes back. A parameter without a gradient
       (unused in this step) counts as zero, so that ranks agree on sizes.

    Attributes:
        armed: set it for the backward that completes the gradients; `finish` clears it.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, ledger: Ledger) -> None:
        self.armed = False
        self.ledger = ledger
        self.num_replicas = layout.sizes["dp_replicate"]
        self.group = layout.group("dp_replicate")
        self.buckets = _deal(params) if self.num_replicas > 1 else []
        self._work: list[tuple[Tensor, dist.Work]] = []
        self._missing = [len(bucket) for bucket in self.buckets]
        for index, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(partial(self._ready, index))

    def _ready(self, index: int, p: Tensor) -> None:
        if not self.armed:
            return
        self._missing[index] -= 1
        while len(self._work) < len(self.buckets) and self._missing[len(self._work)] == 0:
            self._launch()

    def _launch(self) -> None:
        """Send the next bucket on its way."""
        flat = torch.cat([_local_grad(p).reshape(-1) for p in self.buckets[len(self._work)]])
        sent = all_reduce_sent(flat.nbytes, self.num_replicas)
        self.ledger.book("gradients", dense_bytes=sent, wire_bytes=sent)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        self._work.append((flat, work))

    def finish(self) -> None:
        """Leave the average in every parameter's gradient; collective over the replicas."""
        while len(self._work) < len(self.buckets):
            self._launch()
        for bucket, (flat, work) in zip(self.buckets, self._work, strict=True):
            with self.ledger.timed("gradients", "wait_s"):
                work.wait()
            flat /= self.num_replicas
            grads = [_local_grad(p) for p in bucket]
            for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(part.view_as(g))
        self.armed = False
        self._work.clear()
        self._missing = [len(bucket) for bucket in self.buckets]


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


def _local_grad(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return local(p.grad)


def _deal(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return buckets of parameters, in the order in which backward tends to finish them."""
    sizes = [(local(p.detach()).nbytes, p.dtype) for p in params]
    return [[params[i] for i in bucket] for bucket in deal(sizes)]


def deal(sizes: Sequence[tuple[int, torch.dtype]]) -> list[list[int]]:
    """Return buckets of indices into (bytes, dtype), last first: one dtype, about 25 MiB each."""
    buckets: list[list[int]] = []
    nbytes = BUCKET_BYTES
    for index in reversed(range(len(sizes))):
        size, dtype = sizes[index]
        if nbytes + size > BUCKET_BYTES or dtype != sizes[buckets[-1][0]][1]:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(index)
        nbytes += size
    return buckets
