"""Unlike replicas in the cost model: each by itself until they meet, then the slowest counts."""

from dataclasses import replace

import pytest
from plan_cases import Flat, job

from thinwire.errors import ConfigError
from thinwire.plan import Outer, mixed_workload, predict, workload_of
from thinwire.plan.workload import Message

# Weights are counted in bytes of a message; each stage owns one partition.
WHOLE = Outer(sync_every=2, owned=(((4 * 10**8, 100),),), numels=(100,))
CUT = Outer(
    sync_every=2,
    owned=(((10**8, 50), (2 * 10**8, 10)), ((10**8, 40),)),
    handed_on=(10**8, 10),
    numels=(100,),
)


def whole(**changes):
    mesh = {"dp_replicate": 2}
    return job(mesh=mesh, outer=WHOLE, scalar_bytes=8, **changes)


def cut(**changes):
    mesh = {"dp_replicate": 2, "pp": 2}
    return job(num_blocks=2, stages=2, mesh=mesh, outer=CUT, scalar_bytes=8, **changes)


def seconds(made):
    return {name: step_s for name, (_, step_s) in predict(made, Flat()).phases.items()}


def alone(one):
    return seconds(workload_of(replace(one, outer=Outer(sync_every=2, owned=one.outer.owned))))


def test_a_step_takes_as_long_as_the_slowest_replica():
    found = seconds(mixed_workload("mixed", [whole(), cut()]))
    # Three blocks, 1 s forward and 2 s backward each; the pipeline: 2 + 2 blocks and 4 messages.
    assert alone(whole())["step"] == pytest.approx(9.0)
    assert found["step"] == pytest.approx(max(alone(whole())["step"], alone(cut())["step"]))
    assert found["step"] > 9.0


def test_the_exchange_begins_when_all_have_come():
    found = seconds(mixed_workload("mixed", [whole(), cut()]))
    # The pipeline's stages hand in 0.3 and 0.1 s, and pass rows on for 0.2 s beside the second.
    assert found["sync"] == pytest.approx(found["step"] + 0.5)
    # A whole replica that has more to say than the pipeline: it waits, then takes its 0.8 s.
    long = replace(whole(), outer=replace(WHOLE, owned=(((8 * 10**8, 100),),)))
    found = seconds(mixed_workload("mixed", [long, cut()]))
    assert found["sync"] == pytest.approx(found["step"] + 0.8)


def test_a_fast_site_waits_for_a_slow_one():
    slow = seconds(mixed_workload("mixed", [whole(), cut()], speeds=(0.25, 1.0)))
    assert slow["step"] == pytest.approx(4 * 9.0)
    same = seconds(mixed_workload("mixed", [whole(), cut()], speeds=(1.0, 1.0)))
    assert same == seconds(mixed_workload("mixed", [whole(), cut()]))


def test_each_stage_sends_its_own_partitions():
    made = mixed_workload("mixed", [whole(), cut()])
    (sync,) = [phase for phase in made.phases if phase.name == "sync"]
    sent = {}
    for op in sync.ops:
        if isinstance(op.work, Message) and op.work.link == "outer":
            sent.setdefault(op.stage, []).append((op.work.axis, op.work.sent))
    assert sent[0] == [("dp_replicate", 4 * 10**8)]
    # The embedding's messages of both replicas, handed on to one later stage.
    assert sent[1] == [("dp_replicate", 10**8), ("dp_replicate", 2 * 10**8), ("pp", 2 * 10**8)]
    assert sent[2] == [("dp_replicate", 10**8)]
    assert made.num_ranks == 3
    assert all(i < index for index, op in enumerate(sync.ops) for i in op.after)


@pytest.mark.parametrize("other", [whole(), replace(whole(), outer=None)])
def test_replicas_need_the_same_rounds(other):
    first = replace(whole(), outer=replace(WHOLE, sync_every=3))
    with pytest.raises(ConfigError, match="same outer rounds"):
        mixed_workload("mixed", [first, other])
