"""Stored weights in the cost model: their speed, their messages' parts, their memory."""

import pytest
import torch
from plan_cases import MESH, job

from thinwire.codecs import Blockwise
from thinwire.eco import Format
from thinwire.eco.rounding import decode, encode
from thinwire.plan import Storage, WeightsPhase, workload_of
from thinwire.plan.memory import memory
from thinwire.plan.stored import StoredCodec
from thinwire.plan.workload import Coding, Message

FP8 = Format.parse("fp8_e4m3")
NAMES = frozenset(f"b{i}.weight" for i in range(3))


@pytest.mark.parametrize("text", ["fp8_e4m3", "int8", "int4", "bf16", "int4 group:32"])
def test_a_format_in_a_codecs_place_codes_as_the_weights_do(text):
    fmt = Format.parse(*text.split())
    codec, x = StoredCodec(fmt), torch.randn(4 * 512, generator=torch.Generator().manual_seed(0))
    wire = codec.encode(x)
    assert wire.numel() == codec.wire_nbytes(x.numel(), torch.float32)
    blocks = fmt.blocks((4, 512), 1)
    wanted = decode(*encode(x.view(4, 512), fmt, blocks), fmt, blocks).view(-1)
    assert torch.equal(codec.decode(wire, x.numel(), torch.float32), wanted)
    both = codec.decode(torch.stack([wire, wire]), x.numel(), torch.float32)
    assert torch.equal(both, torch.stack([wanted, wanted]))
    assert torch.equal(codec.decode_sum(torch.stack([wire, wire]), x.numel(), x.dtype), 2 * wanted)
    short = codec.decode(codec.encode(x[:700]), 700, torch.float32)
    assert short.shape == (700,)


def works(made, kind, **wanted):
    found = [op.work for phase in made.phases for op in phase.ops if isinstance(op.work, kind)]
    return [w for w in found if all(getattr(w, k) == v for k, v in wanted.items())]


def stored_job(mesh, **changes):
    return job(mesh=mesh, storage=Storage(fmt=FP8, names=NAMES), **changes)


def test_a_gather_of_stored_weights_carries_codes_and_scales():
    made = workload_of(stored_job({"dp_shard": 2}))
    sizes = {m.nbytes for m in works(made, Message, link="weights")}
    # 500 rows of 1,000 codes and a scale each; the root as it is, in float32.
    assert sizes == {500 * 1004, 4 * 500 * 1000}
    read = works(made, Coding, what="decode", codec=StoredCodec(FP8))
    # Both passes read both shards of three blocks; the optimizer reads its own.
    assert sorted(w.numel for w in read) == [*[10**6] * 6, 3 * 500_000]


def test_a_smaller_codec_takes_the_place_of_the_codes():
    codec = Blockwise(bits=4, block_size=128)
    made = workload_of(stored_job({"dp_shard": 2}, weights=(WeightsPhase(1.0, codec),)))
    sizes = {m.nbytes for m in works(made, Message, link="weights")}
    assert sizes == {codec.wire_nbytes(500_000, torch.float32)}
    # Read from storage once a step, before they are coded anew.
    assert len(works(made, Coding, what="decode", codec=StoredCodec(FP8), numel=500_000)) == 3


def test_weights_that_no_gather_brings_are_read_where_they_are_used():
    made = workload_of(stored_job({}))
    read = works(made, Coding, what="decode", codec=StoredCodec(FP8), numel=10**6)
    assert len(read) == 6
    assert not works(made, Message)


def test_ranks_agree_on_scales_and_verdicts():
    storage = Storage(fmt=FP8, names=NAMES, flag_bytes=(4,), maxima_bytes={"tp": (300, 100)})
    made = workload_of(job(mesh=MESH | {"tp": 2}, storage=storage))
    sent = sorted(m.nbytes for m in works(made, Message, link="scalars") if m.nbytes)
    assert sent == [4, 100, 300]


def test_memory_holds_codes_not_floats():
    plain, stored = (memory(j)["weights"] for j in (job(), stored_job({})))
    assert plain - stored == 3 * (4 * 10**6 - 1000 * 1004)
