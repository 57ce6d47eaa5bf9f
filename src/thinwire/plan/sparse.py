"""What SCAPE's exchange sends in a step, by its own table, mask and value formulas."""

from dataclasses import dataclass

import torch

from thinwire.comm.ledger import all_reduce_sent
from thinwire.plan import messages
from thinwire.plan.job import Job
from thinwire.plan.workload import SPARSE, Coding, Compute, Message
from thinwire.scape.messages import message_nbytes
from thinwire.scape.reduce import ValueWire, owners_sent
from thinwire.scape.table import Piece, Table, build_table

__all__ = ["SparseWorks", "sparse_works"]

LINK, AXIS = "gradients", "dp_replicate"
# Reads and writes of a step's sweeps over weights, moment, residual and gradient, per value.
SWEEP_BYTES = 24.0


@dataclass(frozen=True, slots=True)
class SparseWorks:
    """One step's exchange.

    Attributes:
        select: passes over the state before the exchange.
        values: the one message of values.
        masks: owners' masks for the next step.
        weights: owners' new weights, in sharded mode.
    """

    select: Compute
    values: list[Coding | Message]
    masks: list[Coding | Message]
    weights: list[Coding | Message]


def sparse_works(job: Job, stage: int, *, sends_all: bool) -> SparseWorks:
    """Return the exchange of a stage's step; `sends_all` for a dense one."""
    sync = job.sync
    assert sync is not None
    num, shards = job.mesh[AXIS], job.mesh["dp_shard"]
    part = job.stages[stage]
    named = [p for layer in (part.root, *part.blocks) for p in layer.params]
    shapes = [(-(-shape[0] // shards), *shape[1:]) for _, shape in named]
    table = build_table([name for name, _ in named], shapes, num)
    density = 1.0 if sends_all else sync.density
    wire = ValueWire(sync.values_dtype)
    dense = all_reduce_sent(table.numel * max(4, sync.values_dtype.itemsize), num)
    values = messages.all_reduce(
        table.kept(density) + 1,  # and the word that says whether a gradient is bad
        torch.float32,
        wire.codec,
        link=LINK,
        axis=AXIS,
        num_ranks=num,
        dense_bytes=dense,
    )
    masks: list[Coding | Message] = []
    if not sends_all and sync.mask_source != "random":
        lengths = _mask_lengths(table, sync.density, sync.mask_format)
        _, sent = owners_sent(lengths)
        masks = messages.owners(sent, link="masks", axis=AXIS, num_ranks=num)
    weights: list[Coding | Message] = []
    if sync.sharded:
        lengths = [job.dtype.itemsize * n for n in _owned_numels(table)]
        _, sent = owners_sent(lengths)
        weights = messages.owners(sent, link="weights", axis=AXIS, num_ranks=num)
    passes = 0.0 if sends_all else SWEEP_BYTES * table.numel
    numel = 0 if sends_all else table.numel
    select = Compute(SPARSE, nbytes=passes, numel=numel, calls=len(table.pieces))
    return SparseWorks(select, values, masks, weights)


def _mask_lengths(table: Table, density: float, form: str) -> list[int]:
    owned: list[list[Piece]] = [[] for _ in range(table.num_ranks)]
    for piece in table.sparse:
        owned[piece.owner].append(piece)
    return [message_nbytes(pieces, density, form) for pieces in owned]


def _owned_numels(table: Table) -> list[int]:
    totals = [0] * table.num_ranks
    for piece in table.sparse:
        totals[piece.owner] += piece.numel
    return totals
