"""What FSDP2 does for a group of parameters: the weight gather and the gradient reduction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.aquavit.segments import Rules, Segment, lay_out, reason_raw, recodes
from thinwire.codecs import Codec
from thinwire.comm.ledger import all_gather_sent, reduce_scatter_sent
from thinwire.plan.job import Job, Layer
from thinwire.plan.workload import Coding, Message

__all__ = ["LayerWorks", "segments_of"]


class LayerWorks:
    """The weight gather and gradient reduce-scatter of one FSDP group.

    Attributes:
        codec: how weights travel; None: as they are, or as they are stored.
        gather: the message.
        near: the second gather, from a copy on the node's ranks; None: there is none.
        encode: what a rank does to its shard, once a step.
        decode: what it does to all shards after each gather.
        reduce: the gradients' coding and message.
        encoded, gathered: whether that has been done in this step.
    """

    def __init__(self, job: Job, layer: Layer, codec: Codec | None) -> None:
        num = job.mesh["dp_shard"]
        self.encoded, self.gathered = False, False
        segments = segments_of(job, layer)
        self.codec = codec if any(_coded(s, codec) for s in segments) else None
        dense = sum(s.numel for s in segments) * job.dtype.itemsize
        if self.codec is not None:
            spans = lay_out(segments, self.codec, job.dtype)
            wire = spans[-1].bytes.stop
        else:
            wire = sum(s.stored_nbytes or s.numel * job.dtype.itemsize for s in segments)
        self.gather = Message(
            "weights", "dp_shard", "all_gather", wire, num, all_gather_sent(dense, num)
        )
        # A second copy, 16 bits a weight, lies on the ranks of each node.
        near = 2 * -(-layer.numel // job.node_size) if job.second_copy else 0
        self.near = None
        if near:
            dense_sent = all_gather_sent(dense, num)
            self.near = Message("weights", "node", "all_gather", near, job.node_size, dense_sent)
        coded = [s for s in segments if _coded(s, self.codec)]
        self.encode = _codings("encode", self.codec, coded, 1)
        self.decode = _codings("decode", self.codec, coded, num)
        if job.storage is not None:
            own = job.storage.codec
            stored = [s for s in segments if s.stored_nbytes]
            # A shard that travels by another codec is read first.
            self.encode[:0] = _codings("decode", own, [s for s in stored if s in coded], 1)
            self.decode += _codings("decode", own, [s for s in stored if s not in coded], num)
        self.reduce = _reduce_works(job, [replace(s, stored_nbytes=0) for s in segments], num)


def _coded(segment: Segment, codec: Codec | None) -> bool:
    """Return whether a segment travels by the codec."""
    if segment.stored_nbytes:
        return recodes(segment, codec)
    return codec is not None and segment.reason is None


def _codings(
    what: str, codec: Codec | None, segments: Sequence[Segment], times: int
) -> list[Coding]:
    """Return the coding of a group's segments, of `times` shards each."""
    if codec is None or not segments:
        return []
    calls = sum(times if what == "decode" and s.stored_nbytes else 1 for s in segments)
    return [Coding(what, "weights", codec, times * sum(s.numel for s in segments), calls)]


def _reduce_works(job: Job, segments: Sequence[Segment], num: int) -> list[Coding | Message]:
    numel = sum(s.numel for s in segments)
    nbytes = numel * job.reduce_dtype.itemsize
    dense = reduce_scatter_sent(nbytes, num)
    codec = job.gradients
    coded = [s for s in segments if s.reason is None] if codec is not None else []
    if codec is None or not coded:
        return [Message("gradients", "dp_shard", "reduce_scatter", num * nbytes, num, dense)]
    wire = lay_out(segments, codec, job.reduce_dtype)[-1].bytes.stop
    values = num * sum(s.numel for s in coded)
    if job.two_hops:
        local = job.node_size
        own = num * wire // local
        return [
            Coding("encode", "gradients", codec, values, num * len(coded)),
            Message("gradients", "node", "all_to_all", num * wire, local, dense),
            Coding("decode", "gradients", codec, values, len(coded)),
            Coding("encode", "gradients", codec, values // local, num // local * len(coded)),
            Message("gradients", "nodes", "all_to_all", own, num // local, 0),
            Coding("decode", "gradients", codec, values // local, len(coded)),
        ]
    return [
        Coding("encode", "gradients", codec, values, num * len(coded)),
        Message("gradients", "dp_shard", "all_to_all", num * wire, num, dense),
        Coding("decode", "gradients", codec, values, len(coded)),
    ]


def segments_of(job: Job, layer: Layer) -> list[Segment]:
    """Return a group's segments as FSDP2 shards it: rows dealt to ranks, padded alike."""
    num, rules = job.mesh["dp_shard"], Rules(min_shard_numel=job.min_shard_numel)
    segments = []
    for name, shape in layer.params:
        numel = -(-shape[0] // num) * torch.Size(shape[1:]).numel()
        reason = reason_raw(rules, name, len(shape), True, numel)
        nbytes = 0
        if job.storage is not None and name in job.storage.names:
            nbytes = job.storage.message_nbytes(name, shape, num)
        segments.append(Segment(name, numel, reason, _Param(job.dtype), nbytes))
    return segments


@dataclass(frozen=True)
class _Param:
    """What a segment asks of FSDP2's parameter."""

    param_dtype: torch.dtype
