"""What a run holds in memory on one rank, in bytes; activations are an estimate."""

from collections.abc import Mapping

import torch

from thinwire.codecs import Codec
from thinwire.plan.job import Job, Stage
from thinwire.plan.sharded import LayerWorks

__all__ = ["memory"]

# Per token, layer and unit of width, in values of the compute dtype, tensor parallelism left out:
# about what a Llama block keeps for backward with fused attention.
ACTIVATIONS_KEPT = 16.0


def memory(job: Job) -> Mapping[str, int]:
    """Return bytes by what they hold, on a rank of the stage that holds most.

    weights: shard, float32 or as stored; gathered: layers gathered at one time; gradients: float32
    shard; optimizer: its state; activations: kept for backward; kept wire: coded weights of all
    groups that stay gathered (Aquavit's keep_wire); others: buffers of systems.
    """
    return max((_of_stage(job, stage) for stage in job.stages), key=lambda m: sum(m.values()))


def _of_stage(job: Job, stage: Stage) -> dict[str, int]:
    shards = job.mesh["dp_shard"]
    numel = stage.numel
    local = -(-numel // shards)
    found = {
        "weights": 4 * local - _saved(job, stage),
        "gradients": 4 * local,
        "optimizer": int(job.state_bytes * local),
        "activations": _activations(job, stage),
    }
    if shards > 1:
        sizes = sorted((block.numel for block in stage.blocks), reverse=True)
        at_once = numel if not job.reshard else stage.root.numel + sum(sizes[: job.prefetch + 1])
        found["gathered"] = at_once * job.dtype.itemsize
        if job.keep_wire == "accumulate" or (job.keep_wire == "forward" and job.reshard):
            kept = max(_wire(job, stage, phase.codec) for phase in job.weights)
            found |= {"kept wire": kept} if kept else {}
    for name, nbytes in job.extra_bytes.items():
        found[name] = int(nbytes * local)
    return found


def _saved(job: Job, stage: Stage) -> int:
    """Return what stored matrices take less than in float32, on one rank."""
    if job.storage is None:
        return 0
    shards = job.mesh["dp_shard"]
    shapes = [p for block in stage.blocks for p in block.params if p[0] in job.storage.names]
    saved = 0
    for name, shape in shapes:
        numel = -(-shape[0] // shards) * torch.Size(shape[1:]).numel()
        saved += (4 - job.storage.beside) * numel
        saved -= job.storage.message_nbytes(name, shape, shards)
    return saved


def _wire(job: Job, stage: Stage, codec: Codec | None) -> int:
    """Return the gathered bytes of all coded groups of a stage."""
    groups = [
        LayerWorks(job, layer, codec) for layer in (stage.root, *stage.blocks) if layer.params
    ]
    return sum(job.mesh["dp_shard"] * g.gather.nbytes for g in groups if g.codec is not None)


def _activations(job: Job, stage: Stage) -> int:
    flights = min(job.mesh["pp"], job.micro_batches)
    width = job.dim * job.dtype.itemsize * job.tokens
    kept = len(stage.blocks) * (1.0 if job.recompute else ACTIVATIONS_KEPT / job.mesh["tp"])
    again = ACTIVATIONS_KEPT / job.mesh["tp"] if job.recompute else 0.0
    return int(width * (flights * kept + again))
