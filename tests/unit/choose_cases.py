"""A dense and a compressed run of a small job, and links of a stated speed to weigh them over."""

from tests.unit.plan_cases import job
from thinwire.codecs import Blockwise
from thinwire.plan import (
    COLLECTIVES,
    CodecSpeed,
    Compute,
    Group,
    Links,
    Speed,
    WeightsPhase,
    workload_of,
)

CODEC = Blockwise(bits=4, block_size=128)
SHARDED = {"mesh": {"dp_shard": 2}, "blocking": True, "prefetch": 0}
DENSE = workload_of(job(name="dense", **SHARDED))
ARM = workload_of(job(name="block4", weights=(WeightsPhase(1.0, CODEC),), **SHARDED))
HALF = workload_of(
    job(name="half", weights=(WeightsPhase(0.5, CODEC), WeightsPhase(0.5)), **SHARDED)
)


def links_of(bytes_per_s, *, codec_s=1e-9, axes=("dp_shard",)):
    speed = Speed.ideal(1e-6, bytes_per_s)
    group = Group(ranks=(), size=2, collectives=dict.fromkeys(COLLECTIVES, speed))
    coding = CodecSpeed(
        encode_latency_s=0.0,
        encode_s_per_value=codec_s,
        decode_latency_s=0.0,
        decode_s_per_value=codec_s,
    )
    mesh = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp"), 1) | dict.fromkeys(axes, 2)
    return Links(
        world_size=2,
        mesh=mesh,
        groups=dict.fromkeys(axes, group),
        codecs={repr(CODEC): coding},
        compute=Compute(recipe="job", step_s=0.1),
    )
