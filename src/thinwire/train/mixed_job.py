"""Unlike replicas (`mesh.replicas`) as the cost model's jobs: one per replica."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from thinwire import sparseloco
from thinwire.plan import Job, Outer
from thinwire.replicas import Layout
from thinwire.replicas.ownership import Share, divide
from thinwire.sparseloco.rounds import note_nbytes
from thinwire.train.axes import check_ranks, parse_replicas
from thinwire.train.config import Config, Mesh, Pipeline
from thinwire.train.job import job_on
from thinwire.train.model import Transformer
from thinwire.train.outer import outer_options

__all__ = ["jobs_of"]

EMBEDDING = "embed.weight"

Shapes = dict[str, tuple[int, ...]]


def jobs_of(config: Config, num_ranks: int, *, overlap: bool, prefetch: int) -> list[Job]:
    """Return a job per replica; arguments as for `job_of`.

    Raises:
        ConfigError: replicas that don't fit the ranks, the model or the batch.
    """
    check_ranks(config, num_ranks)
    tables = parse_replicas(config.mesh.replicas)
    held = [shapes for table in tables for shapes in _held(config, len(table["ranks"]))]
    shares = divide(Layout.of(tables), held, EMBEDDING)
    jobs = []
    for table in tables:
        ranks, ratio = table["ranks"], table.get("rank_ratio", 0)
        alone = _alone(config, len(tables), len(ranks), ratio)
        sizes = {"pp": len(ranks), "dp_replicate": len(tables), "dp_shard": 1, "tp": 1}
        job = job_on(alone, sizes, overlap=overlap, prefetch=prefetch)
        outer = _outer(config, shares, held, ranks, compressed=ratio > 0)
        jobs.append(replace(job, outer=outer))
    return jobs


def _alone(config: Config, num_replicas: int, stages: int, ratio: int) -> Config:
    """Return the configuration as if all replicas were like one."""
    cut = bool(ratio) and stages > 1
    pipeline = replace(config.systems.pipeline, ratio=ratio) if cut else Pipeline()
    mesh = Mesh(pp=stages, dp_replicate=num_replicas, dp_shard=1, tp=1)
    return replace(config, mesh=mesh, systems=replace(config.systems, pipeline=pipeline))


def _held(config: Config, num_stages: int) -> list[Shapes]:
    """Return names and shapes of the parameters of each stage."""
    found = []
    for stage in range(num_stages):
        with torch.device("meta"):
            module = Transformer(
                config.model, config.data.seq_len_tokens, stage=stage, num_stages=num_stages
            )
        found.append({name: tuple(p.shape) for name, p in module.named_parameters()})
    return found


def _outer(
    config: Config, shares: Sequence[Share], held: Sequence[Shapes], ranks: Sequence[int],
    *, compressed: bool,
) -> Outer:  # fmt: skip
    """Return a replica's exchange: each stage's own partitions, and the embedding's rows."""
    options = outer_options(config.systems.outer)

    def message(share: Share, rank: int) -> tuple[int, int]:
        shapes = {name: held[rank][name] for name in share.names}
        numel = sum(math.prod(shape) for shape in shapes.values())
        return sparseloco.message_nbytes(shapes, options), numel

    rows = next(share for share in shares if EMBEDDING in share.names)
    return Outer(
        sync_every=config.systems.outer.sync_every,
        owned=tuple(tuple(message(s, r) for s in shares if r in s.owners) for r in ranks),
        handed_on=message(rows, ranks[0]) if compressed else (0, 0),
        note_bytes=note_nbytes(len(rows.owners)),
    )
