"""What FSDP2 does for a group of parameters: the weight gather and the gradient reduction."""

from collections.abc import Sequence

import torch

from thinwire.aquavit.segments import Rules, Segment, Span, lay_out, reason_raw
from thinwire.codecs import Codec
from thinwire.comm.ledger import all_gather_sent, reduce_scatter_sent
from thinwire.plan.job import Job, Layer
from thinwire.plan.workload import Coding, Message

__all__ = ["LayerWorks", "segments_of"]


class LayerWorks:
    """The weight gather and gradient reduce-scatter of one FSDP group."""

    def __init__(self, job: Job, layer: Layer, codec: Codec | None) -> None:
        num = job.mesh["dp_shard"]
        self.codec, self.encoded, self.gathered = codec, False, False
        segments = segments_of(layer, num, job.min_shard_numel)
        numel = sum(s.numel for s in segments)
        dense = numel * job.dtype.itemsize
        spans = lay_out(segments, codec, job.dtype) if codec is not None else []
        coded = [span for span in spans if span.coded]
        if not coded:
            self.codec = None
        wire = spans[-1].bytes.stop if coded else dense
        self.gather = Message(
            "weights", "dp_shard", "all_gather", wire, num, all_gather_sent(dense, num)
        )
        # A second copy, 16 bits a weight, lies on the ranks of each node.
        near = 2 * -(-layer.numel // job.node_size) if job.second_copy else 0
        self.near = None
        if near:
            dense_sent = all_gather_sent(dense, num)
            self.near = Message("weights", "node", "all_gather", near, job.node_size, dense_sent)
        self.encode = self._coding("encode", "weights", codec, coded, 1)
        self.decode = self._coding("decode", "weights", codec, coded, num)
        self.reduce = _reduce_works(job, segments, num)

    @staticmethod
    def _coding(
        what: str, link: str, codec: Codec | None, spans: Sequence[Span], times: int
    ) -> Coding | None:
        if codec is None or not spans:
            return None
        numel = times * sum(span.segment.numel for span in spans)
        return Coding(what, link, codec, numel, len(spans))


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


def segments_of(layer: Layer, num_ranks: int, min_shard_numel: int) -> list[Segment]:
    """Return a group's segments as FSDP2 shards it: rows dealt to ranks, padded alike."""
    rules = Rules(min_shard_numel=min_shard_numel)
    segments = []
    for name, shape in layer.params:
        numel = -(-shape[0] // num_ranks) * torch.Size(shape[1:]).numel()
        reason = reason_raw(rules, name, len(shape), True, numel)
        segments.append(Segment(name, numel, reason, None))
    return segments
