"""From a `Job` to the operations of its steps, in the order in which the host issues them.

One step, per stage:
1. Micro-batches in 1F1B order. Forward of a block: gather its weights, compute, tensor-parallel
   reductions. Backward: gather again, recompute if asked, compute, reductions; after the last
   micro-batch, reduce gradients over dp_shard, and over dp_replicate in buckets.
2. Wait for all gradients, agree on loss and norm, exchange sparse messages, optimizer.
3. In the last step of a round, the exchange between replicas.

With `prefetch` p, a gather may start once the block p places ahead of its own has begun; with 0 it
waits for everything before it. `blocking` lets a reduce-scatter hold up the host.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.comm.ledger import all_reduce_sent
from thinwire.plan import messages
from thinwire.plan.job import Job, Layer, WeightsPhase
from thinwire.plan.memory import memory
from thinwire.plan.sharded import LayerWorks
from thinwire.plan.sparse import sparse_works
from thinwire.plan.workload import (
    DENSE_STEP,
    SYNC,
    Coding,
    Compute,
    Message,
    Op,
    Phase,
    Workload,
    check_shares,
    sent_bytes,
)

__all__ = ["workload_of"]

BACKWARD = 2.0  # flops of backward over forward


def workload_of(job: Job) -> Workload:
    """Return what the job's steps do.

    Raises:
        ConfigError: settings that no model covers.
    """
    phases = []
    for name, share, weights, sparse, syncs in _kinds(job):
        ops = _Builder(job, weights, sparse, syncs).step()
        phases.append(Phase(name, share, tuple(ops)))
    check_shares(phases)
    busiest = max(job.stages, key=lambda s: s.root.forward_flops + _block_flops(s.blocks))
    forward = busiest.root.forward_flops + _block_flops(busiest.blocks)
    again = _block_flops(busiest.blocks) if job.recompute else 0.0
    return Workload(
        name=job.name,
        phases=tuple(phases),
        num_ranks=job.num_ranks,
        mesh=dict(job.mesh),
        tokens=job.tokens * job.micro_batches * job.mesh["dp_replicate"] * job.mesh["dp_shard"],
        params=job.params,
        flops=job.micro_batches * (forward * (1 + BACKWARD) + again),
        forward_flops=job.micro_batches * forward,
        rank_tokens=job.tokens * job.micro_batches,
        rank_params=job.first_params or job.stages[0].numel,
        memory=memory(job),
        systems=dict(job.systems),
    )


def _block_flops(blocks: Iterable[Layer]) -> float:
    return sum(block.forward_flops for block in blocks)


def _kinds(job: Job) -> list[tuple[str, float, WeightsPhase, bool | None, bool]]:
    """Return (name, share, weights, sparse or dense exchange, whether a round ends)."""
    kinds = []
    dense = job.sync.dense_share if job.sync is not None else 0.0
    sparse: list[tuple[float, bool | None]] = [(1.0, None)]
    if job.sync is not None:
        sparse = [(share, flag) for share, flag in ((1 - dense, True), (dense, False)) if share]
    every = job.outer.sync_every if job.outer is not None else 0
    rounds = [(1.0, False)]
    if every:
        rounds = [(1 - 1 / every, False), (1 / every, True)] if every > 1 else [(1.0, True)]
    for weights in job.weights:
        for sparse_share, flag in sparse:
            for round_share, syncs in rounds:
                words = [weights.name, DENSE_STEP if flag is False else "", SYNC * syncs]
                name = ", ".join(w for w in words if w) or "step"
                share = weights.share * sparse_share * round_share
                kinds.append((name, share, weights, flag, syncs))
    return kinds


@dataclass
class _Builder:
    """Writes the operations of one step."""

    job: Job
    weights: WeightsPhase
    sparse: bool | None
    syncs: bool
    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages = len(self.job.stages)
        self.host = [-1] * stages  # last operation of each compute stream
        self.late: list[tuple[Coding, int] | None] = [None] * stages
        self.grads: list[list[int]] = [[] for _ in range(stages)]
        self.arrived: dict[tuple[str, int, int], int] = {}
        self.layers = [self._layer_works(stage) for stage in range(stages)]

    # Writing

    def add(self, work: Compute | Coding | Message, stage: int, after: Sequence[int] = (),
            carried: Sequence[int] = (), to_stage: int = -1) -> int:  # fmt: skip
        """Append an operation and return its index."""
        waits = tuple(sorted({i for i in after if i >= 0}))
        self.ops.append(Op(work, waits, tuple(carried), stage, to_stage))
        return len(self.ops) - 1

    def run(self, work: Compute | Coding, stage: int, after: Sequence[int] = ()) -> int:
        """Append work on the compute stream, after whatever holds up the host."""
        self.host[stage] = self.add(work, stage, [*after, self.host[stage]])
        return self.host[stage]

    def through(self, works: Sequence[Coding | Message], stage: int, first: Sequence[int] = ()
                ) -> int:  # fmt: skip
        """Append works one after the other, each waiting for the one before; return the last."""
        last = self.host[stage]
        for work in works:
            last = self.add(work, stage, [last, *first])
            if isinstance(work, Coding):
                self.host[stage] = last
        return last

    # A step

    def step(self) -> list[Op]:
        """Return the operations of a step."""
        self._passes()
        for stage in range(len(self.job.stages)):
            self._end_backward(stage)
        done = list(self.host)
        for stage in range(len(self.job.stages)):
            self._finish(stage, done)
        return self.ops

    def _passes(self) -> None:
        """Write forwards and backwards of all stages in 1F1B order."""
        job = self.job
        num, count = len(job.stages), job.micro_batches
        orders = [_order(stage, num, count) for stage in range(num)]
        places = [0] * num
        while any(place < len(order) for place, order in zip(places, orders, strict=True)):
            moved = False
            for stage in range(num):
                while places[stage] < len(orders[stage]):
                    way, index = orders[stage][places[stage]]
                    if not self._ready(way, stage, index):
                        break
                    (self._forward if way == "forward" else self._backward)(stage, index)
                    places[stage] += 1
                    moved = True
            assert moved, "1F1B never blocks"

    def _ready(self, way: str, stage: int, index: int) -> bool:
        first = stage == 0 if way == "forward" else stage == len(self.job.stages) - 1
        return first or (way, stage, index) in self.arrived

    def _forward(self, stage: int, index: int) -> None:
        job, part = self.job, self.job.stages[stage]
        gathers = _Gathers(self, stage, "forward")
        waits = [*self._receive("forward", stage, index), *gathers.need(-1)]
        for place, block in enumerate(part.blocks):
            waits += gathers.need(place)
            waits = self._read_stored(stage, block, waits)
            self._compute("forward", stage, block.forward_flops, waits)
            self._reductions(stage, "forward")
            waits = []
        self._compute("forward", stage, part.root.forward_flops, waits)
        if stage < len(job.stages) - 1:
            self._send("forward", stage, stage + 1, index)

    def _backward(self, stage: int, index: int) -> None:
        job, part = self.job, self.job.stages[stage]
        last = index == job.micro_batches - 1
        reduces = last or job.reduce_every_micro_batch
        gathers = _Gathers(self, stage, "backward")
        waits = [*self._receive("backward", stage, index), *gathers.need(-1)]
        self._compute("backward", stage, BACKWARD * part.root.forward_flops, waits)
        for place in reversed(range(len(part.blocks))):
            flops = part.blocks[place].forward_flops
            waits = gathers.need(place)
            if job.recompute:
                waits = self._read_stored(stage, part.blocks[place], waits)
                self._compute("backward", stage, flops, waits)
                self._reductions(stage, "forward", again=True)
                waits = []
            waits = self._read_stored(stage, part.blocks[place], waits)
            self._compute("backward", stage, BACKWARD * flops, waits)
            self._reductions(stage, "backward")
            if reduces:
                self._reduce(stage, place)
            if last:
                self._buckets(stage, place)
        if reduces:
            self._reduce(stage, -1)
            self._decode_gradients(stage)
        if last:
            self._buckets(stage, -1)
        if stage > 0:
            self._send("backward", stage, stage - 1, index)

    def _read_stored(self, stage: int, layer: Layer, waits: list[int]) -> list[int]:
        """Write the decoding of stored weights that no gather brings; return what is left to wait.

        It happens where the weights are used, after what the layer waits for.
        """
        storage = self.job.storage
        if storage is None or self.job.mesh["dp_shard"] > 1:
            return waits
        shapes = [shape for name, shape in layer.params if name in storage.names]
        if not shapes:
            return waits
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        self.run(Coding("decode", "weights", storage.codec, numel, len(shapes)), stage, waits)
        return []

    def _compute(self, what: str, stage: int, flops: float, waits: Sequence[int]) -> None:
        self.run(Compute(what, flops), stage, waits)

    # Links

    def _layer_works(self, stage: int) -> dict[int, LayerWorks]:
        if self.job.mesh["dp_shard"] == 1:
            return {}
        part = self.job.stages[stage]
        layers = {-1: part.root} | dict(enumerate(part.blocks))
        return {
            place: LayerWorks(self.job, layer, self.weights.codec)
            for place, layer in layers.items()
            if layer.params
        }

    def issue(self, stage: int, place: int, way: str) -> list[int]:
        """Write a layer's weight gather and return its message, if there is one."""
        works, keep = self.layers[stage].get(place), self.job.keep_wire
        if works is None or (way == "backward" and not self.job.reshard):
            return []
        if works.codec is not None and works.gathered and keep != "none":
            works.gathered = keep == "accumulate"
            return []
        works.gathered = True
        if not works.encoded:
            # Weights change once a step: one encoding serves all gathers.
            works.encoded = True
            for work in works.encode:
                self.run(work, stage)
        gather = works.near if way == "backward" and works.near is not None else works.gather
        return [self.add(gather, stage, [self.host[stage]])]

    def decode(self, stage: int, place: int, way: str, sent: list[int]) -> list[int]:
        """Write the decoding of a gather where its layer computes; return what that waits for."""
        works = self.layers[stage].get(place)
        if works is None or (way == "backward" and not self.job.reshard):
            return sent
        if way == "backward" and works.near is not None:
            return sent  # the second copy is not coded
        for work in works.decode:
            sent = [self.run(work, stage, sent)]
        return sent

    def _reduce(self, stage: int, place: int) -> None:
        """Write a layer's gradient reduce-scatter."""
        works = self.layers[stage].get(place)
        if works is None:
            return
        self._decode_gradients(stage)
        for work in works.reduce:
            self._decode_gradients(stage)
            if isinstance(work, Message):
                sent = self.add(work, stage, [self.host[stage]])
                self.grads[stage].append(sent)
                self.host[stage] = sent if self.job.blocking else self.host[stage]
            elif work.what == "encode":
                self.run(work, stage)
            else:
                # Where messages fly beside the computation, the next layer's comes first.
                self.late[stage] = (work, self.grads[stage][-1])
        if self.job.blocking:
            self._decode_gradients(stage)

    def _decode_gradients(self, stage: int) -> None:
        late = self.late[stage]
        if late is not None:
            work, sent = late
            self.grads[stage].append(self.run(work, stage, [sent]))
            self.late[stage] = None

    def _receive(self, way: str, stage: int, index: int) -> list[int]:
        """Return what a pass waits for, its coefficients unpacked."""
        sent, crossing = self.arrived.get((way, stage, index)), self.job.boundaries
        if sent is None or crossing is None:
            return []
        if crossing.codec is not None:
            sent = self.run(
                Coding("decode", "pipeline", crossing.codec, crossing.numel), stage, [sent]
            )
        return [self.run(Compute(way, crossing.flops), stage, [sent])] if crossing.flops else [sent]

    def _buckets(self, stage: int, place: int) -> None:
        """Launch the gradient buckets that a block's backward completes."""
        num = self.job.mesh["dp_replicate"]
        if num == 1 or self.job.sync is not None or self.job.outer is not None:
            return
        for nbytes, completed_by in self.job.buckets[stage]:
            if completed_by == place:
                works = messages.plain_all_reduce(
                    nbytes, link="gradients", axis="dp_replicate", num_ranks=num
                )
                self.grads[stage].append(self.through(works, stage, self.grads[stage][-1:]))

    def _reductions(self, stage: int, way: str, *, again: bool = False) -> None:
        """Write the tensor-parallel collectives of one block, one way."""
        job, num = self.job, self.job.mesh["tp"]
        if num == 1:
            return
        link = job.tensor
        codec = link.codec if way == "forward" else link.backward_codec or link.codec
        common = {"link": "tensor", "axis": "tp", "num_ranks": num, "min_bytes": link.min_bytes}
        numel = job.tokens * job.dim
        for part in range(2):
            if job.sequence_parallel:
                chunk = job.tokens // job.seq_len * -(-job.seq_len // num) * job.dim
                works = messages.all_gather(chunk, job.dtype, codec, **common)  # type: ignore[arg-type]
                self.host[stage] = self.through(works, stage)
                works = messages.reduce_scatter(chunk, job.dtype, codec, **common)  # type: ignore[arg-type]
            else:
                works = messages.all_reduce(
                    numel,
                    job.dtype,
                    codec,
                    algorithm=link.algorithm,
                    **common,  # type: ignore[arg-type]
                )
            if again and part == 1:
                continue  # recomputing stops before the block's last reduction
            self.host[stage] = self.through(works, stage)

    def _send(self, way: str, stage: int, to_stage: int, index: int) -> None:
        """Write a boundary's message."""
        crossing = self.job.boundaries
        assert crossing is not None
        if crossing.flops:
            self.run(Compute(way, crossing.flops), stage)
        if crossing.codec is not None:
            self.run(Coding("encode", "pipeline", crossing.codec, crossing.numel), stage)
        nbytes = crossing.forward_bytes if way == "forward" else crossing.backward_bytes
        message = Message("pipeline", "pp", "send_recv", nbytes, 2, crossing.dense_bytes)
        sent = self.add(message, stage, [self.host[stage]], to_stage=to_stage)
        self.arrived[way, to_stage, index] = sent

    # After backward

    def _end_backward(self, stage: int) -> None:
        job = self.job
        if job.mesh["tp"] > 1 and job.sequence_parallel:
            self._sequence_ends(stage)
        self.run(Compute("optimizer"), stage, self.grads[stage])

    def _sequence_ends(self, stage: int) -> None:
        """Join the sequence after the last block, gather its gradient, sum the norms' gradients."""
        job, num = self.job, self.job.mesh["tp"]
        chunk = job.tokens // job.seq_len * -(-job.seq_len // num) * job.dim
        for _ in range(job.micro_batches):
            for codec in (job.tensor.codec, job.tensor.backward_codec or job.tensor.codec):
                works = messages.all_gather(
                    chunk, job.dtype, codec, link="tensor", axis="tp", num_ranks=num,
                    min_bytes=job.tensor.min_bytes,
                )  # fmt: skip
                self.host[stage] = self.through(works, stage)
        norms = sum(
            torch.Size(shape).numel() for block in job.stages[stage].blocks
            for _, shape in block.params if len(shape) == 1
        )  # fmt: skip
        works = messages.plain_all_reduce(4 * norms, link="tensor", axis="tp", num_ranks=num)
        self.host[stage] = self.through(works, stage)

    def _finish(self, stage: int, done: Sequence[int]) -> None:
        """Write what follows backward, all stages' backwards being `done`."""
        job = self.job
        if job.num_ranks > 1:
            works = messages.plain_all_reduce(
                job.scalar_bytes, link="scalars", axis="world", num_ranks=job.num_ranks
            )
            self.host[stage] = self.add(works[0], stage, done)
        if job.sync is not None and job.mesh["dp_replicate"] > 1:
            self._sparse(stage)
        numel = job.stages[stage].numel // job.mesh["dp_shard"]
        # Read weights, gradients and two moments, write three of them.
        self.run(Compute("optimizer", nbytes=28.0 * numel, numel=numel), stage, [self.host[stage]])
        self._step_stored(stage)
        if self.syncs:
            self._round(stage)

    def _step_stored(self, stage: int) -> None:
        """Write what stored weights add to the optimizer: they are read, agreed on and rounded."""
        job, storage = self.job, self.job.storage
        if storage is None:
            return
        works: list[Coding | Message] = []
        for nbytes in storage.flag_bytes if job.num_ranks > 1 else ():
            works += messages.plain_all_reduce(
                nbytes, link="scalars", axis="world", num_ranks=job.num_ranks
            )
        for axis, sizes in storage.maxima_bytes.items():
            for nbytes in sizes:
                works += messages.plain_all_reduce(
                    nbytes, link="scalars", axis=axis, num_ranks=job.mesh[axis]
                )
        part = job.stages[stage]
        named = [p for block in part.blocks for p in block.params if p[0] in storage.names]
        numel = sum(torch.Size(shape).numel() for _, shape in named) // job.mesh["dp_shard"]
        for what in ("decode", "encode") if numel else ():
            works.append(Coding(what, "weights", storage.codec, numel, len(named)))
        self.host[stage] = self.through(works, stage)

    def _sparse(self, stage: int) -> None:
        """Write the exchange of values and masks; with lag 1, masks travel under the next step."""
        sync = self.job.sync
        assert sync is not None
        works = sparse_works(self.job, stage, sends_all=not self.sparse)
        if works.masks and sync.lag == 0:
            self.host[stage] = self.through(works.masks, stage)
        # The masks of this step left at the end of the one before, where they stand as now.
        late = works.masks if sync.lag else []
        carried = [len(self.ops) + 1 + len(works.values)] if late else []
        self.host[stage] = self.add(works.select, stage, [self.host[stage]], carried)
        self.host[stage] = self.through(works.values, stage)
        for work in late:
            self.add(work, stage, [self.host[stage]])
        if works.weights:
            self.host[stage] = self.through(works.weights, stage)

    def _round(self, stage: int) -> None:
        """Write the exchange between replicas that ends a round."""
        outer, part = self.job.outer, self.job.stages[stage]
        assert outer is not None
        own = [
            torch.Size(s).numel() for layer in (part.root, *part.blocks) for _, s in layer.params
        ]
        numels = outer.numels or own
        numel = sum(numels)
        pieces = [self._inside("all_gather", n, num) for n, num in outer.gathered if num > 1]
        self.host[stage] = self.through(pieces, stage)
        picked = numel if outer.message_bytes or outer.owned else 0
        select = Compute("select", nbytes=16.0 * numel, numel=picked)
        self.run(select, stage, [self.host[stage]])
        last = self.through(self._exchange(stage, numels), stage)
        self.run(Compute("select", nbytes=8.0 * numel), stage, [last])
        ranks = self.job.mesh["dp_shard"] * self.job.mesh["tp"]
        handed = [self._inside("broadcast", 4 * n, ranks) for n in numels if outer.gathered]
        self.host[stage] = self.through(handed, stage)

    def _exchange(self, stage: int, numels: Sequence[int]) -> list[Coding | Message]:
        """Return the messages between replicas of a round."""
        job, outer = self.job, self.job.outer
        assert outer is not None
        num, works = job.mesh["dp_replicate"], []

        def gather(nbytes: int, dense_bytes: int) -> Message:
            return Message("outer", "dp_replicate", "all_gather", nbytes, num, dense_bytes)

        if outer.owned:
            works = [gather(n, all_reduce_sent(4 * size, num)) for n, size in outer.owned[stage]]
            nbytes, size = outer.handed_on
            later = len(job.stages) - 1
            if nbytes and later and stage == 0:
                works.append(
                    Message("outer", "pp", "all_gather", num * nbytes, later + 1, 4 * size * later)
                )
        elif outer.message_bytes:
            works = [gather(outer.message_bytes, all_reduce_sent(4 * sum(numels), num))]
        else:
            return [
                work for size in numels
                for work in messages.all_reduce(
                    size, torch.float32, outer.codec, link="outer", axis="dp_replicate",
                    num_ranks=num, min_bytes=0,
                )
            ]  # fmt: skip
        votes = outer.note_bytes and (stage == 0 or not outer.owned)  # a replica has one voice
        return [*works, gather(outer.note_bytes, 0)] if votes else [*works]

    def _inside(self, collective: str, nbytes: int, num_ranks: int) -> Message:
        """Return one of a replica's own messages around a round."""
        axis = "dp_shard" if self.job.mesh["dp_shard"] > 1 else "tp"
        dense = sent_bytes(collective, nbytes, num_ranks)
        return Message("weights", axis, collective, nbytes, num_ranks, dense)


class _Gathers:
    """The weight gathers of one pass, issued `prefetch` layers ahead of the one that computes."""

    def __init__(self, builder: _Builder, stage: int, way: str) -> None:
        self.builder, self.stage, self.way = builder, stage, way
        blocks = range(len(builder.job.stages[stage].blocks))
        self.order = [-1, *(blocks if way == "forward" else reversed(blocks))]
        self.sent: dict[int, list[int]] = {}

    def need(self, place: int) -> list[int]:
        """Return what the layer's computation waits for."""
        index = self.order.index(place)
        for ahead in self.order[index : index + self.builder.job.prefetch + 1]:
            if ahead not in self.sent:
                self.sent[ahead] = self.builder.issue(self.stage, ahead, self.way)
        return self.builder.decode(self.stage, place, self.way, self.sent[place])


def _order(stage: int, num_stages: int, count: int) -> list[tuple[str, int]]:
    """Return a stage's passes in 1F1B order."""
    ahead = min(num_stages - stage, count)
    order = [("forward", i) for i in range(ahead)]
    for i in range(count):
        order.append(("backward", i))
        if ahead + i < count:
            order.append(("forward", ahead + i))
    return order
