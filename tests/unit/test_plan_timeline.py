"""Timelines that can be added up by hand."""

import pytest
import torch
from plan_cases import Flat, job

from thinwire.codecs import Blockwise
from thinwire.errors import ConfigError
from thinwire.plan import SparseSync, WeightsPhase, predict, workload_of
from thinwire.plan.predict import break_even_bits_per_s, compare
from thinwire.plan.timeline import play
from thinwire.plan.workload import Compute, Message, Op

FSDP = {"mesh": {"dp_shard": 2}}
DDP = {"mesh": {"dp_replicate": 2}}


def step(made, costs=None, **options):
    return predict(workload_of(made), costs or Flat(), **options)


def test_one_rank_computes_three_forwards_and_sends_nothing():
    found = step(job())
    assert found.step_s == pytest.approx(9.0)
    assert found.sent_bytes == {}
    assert found.waiting_s == found.bubble_s == 0.0


def test_recomputation_adds_a_forward_of_the_blocks():
    assert step(job(recompute=True)).step_s == pytest.approx(12.0)


def test_blocking_collectives_add_up():
    # 4 groups of 10^6 weights: gathers hand in half of 4 MB, twice; reductions hand in all of it.
    found = step(job(prefetch=0, blocking=True, **FSDP))
    assert found.exposed_s["weights"] == pytest.approx(8 * 2e-3)
    assert found.exposed_s["gradients"] == pytest.approx(4 * 4e-3)
    assert found.step_s == pytest.approx(9.0 + 16e-3 + 16e-3)


def test_prefetched_gathers_hide_under_the_computation():
    found = step(job(prefetch=1, **FSDP))
    # Exposed are the first two gathers of each pass (the embedding's and the first block's; the
    # second flies with the first), and the reductions after the last backward: of the last block
    # and of the embedding.
    assert found.exposed_s["weights"] == pytest.approx(2 * 2 * 2e-3)
    assert found.exposed_s["gradients"] == pytest.approx(2 * 4e-3)
    assert found.busy_s["weights"] == pytest.approx(8 * 2e-3)


def test_a_slow_link_is_exposed_whatever_the_prefetch():
    slow = Flat(overrides={"weights": 10.0, "gradients": 0.0})
    deep, shallow = (step(job(prefetch=p, **FSDP), slow).step_s for p in (3, 1))
    # 8 gathers of 10 s; the last gather's computation follows it.
    assert deep == pytest.approx(shallow, rel=0.05)
    assert deep >= 80.0


def test_kept_wire_gathers_once_and_decodes_twice():
    codec = Blockwise(bits=4, block_size=128)
    weights = (WeightsPhase(1.0, codec),)
    common = {"weights": weights, "prefetch": 0, "blocking": True} | FSDP
    again, kept = step(job(**common)), step(job(keep_wire="forward", **common))
    assert kept.sent_bytes["weights"] == again.sent_bytes["weights"] / 2
    assert kept.decode_s == again.decode_s == pytest.approx(8 * 1e6 / 1e9)
    assert kept.encode_s == pytest.approx(4 * 5e5 / 1e9)  # once a step
    assert again.dense_bytes["weights"] == 8 * 2_000_000


def test_accumulation_reduces_in_the_last_micro_batch():
    base = {"prefetch": 0, "blocking": True, "micro_batches": 3}
    last, every = (step(job(reduce_every_micro_batch=e, **base, **FSDP)) for e in (False, True))
    assert every.sent_bytes["gradients"] == 3 * last.sent_bytes["gradients"]
    assert every.sent_bytes["weights"] == last.sent_bytes["weights"]


def test_gradient_buckets_fly_beside_the_rest_of_backward():
    # Block 2's bucket is complete after its backward: 4 s of other backwards hide 3 s of wire.
    costs = Flat(overrides={"gradients": 3.0})
    found = step(job(buckets=(((10, 2), (10, 0)),), **DDP), costs)
    assert found.step_s == pytest.approx(3 + 6 + 3)
    assert found.exposed_s["gradients"] == pytest.approx(3.0)
    assert found.busy_s["gradients"] == pytest.approx(6.0)


def test_tensor_parallel_sums_hold_up_the_computation():
    costs = Flat(overrides={"tensor": 0.5})
    found = step(job(mesh={"tp": 2}), costs)
    # Two sums per block, each way.
    assert found.step_s == pytest.approx(9.0 + 3 * 4 * 0.5)
    assert found.exposed_s["tensor"] == pytest.approx(6.0)


def test_masks_hide_under_the_next_step_unless_lag_is_0():
    sync = {"density": 0.01, "lag": 1}
    costs = Flat(overrides={"masks": 5.0, "gradients": 1.0})
    late = step(job(sync=SparseSync(**sync), **DDP), costs)
    early = step(job(sync=SparseSync(**sync | {"lag": 0}), **DDP), costs)
    assert late.step_s == pytest.approx(9.0 + 2e-5 + 1.0, rel=1e-3)
    assert early.step_s == pytest.approx(9.0 + 5.0 + 1.0, rel=1e-3)
    slow = Flat(overrides={"masks": 20.0, "gradients": 1.0})
    assert step(job(sync=SparseSync(**sync), **DDP), slow).exposed_s["masks"] == pytest.approx(11.0)


def test_two_stages_leave_the_known_bubble():
    # 1F1B with M micro-batches on S stages, no wire: (M + S - 1) forwards and backwards.
    free = Flat(overrides={"pipeline": 0.0})
    found = step(job(num_blocks=1, stages=2, mesh={"pp": 2}, micro_batches=4), free)
    assert found.step_s == pytest.approx((4 + 1) * 3.0)
    assert found.bubble_s == pytest.approx(3.0)
    assert found.exposed_s.get("pipeline", 0.0) == 0.0
    wired = step(job(num_blocks=1, stages=2, mesh={"pp": 2}, micro_batches=4))
    assert wired.step_s > found.step_s
    assert wired.sent_bytes["pipeline"] == 4 * 10**8


def test_the_slowest_rank_holds_all_up():
    assert step(job(), slowdown=1.5).step_s == pytest.approx(13.5)
    for value in (0.5, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="slowdown must be at least 1 and finite"):
            step(job(), slowdown=value)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"keep_wire": "none"}, 0),
        ({"keep_wire": "forward"}, 4),
        ({"keep_wire": "forward", "reshard": False}, 0),
        ({"keep_wire": "accumulate", "reshard": False}, 4),
    ],
)
def test_kept_wire_holds_all_groups_gathered(changes, groups):
    codec = Blockwise(bits=8)
    found = step(job(**FSDP, weights=(WeightsPhase(1.0, codec),), **changes)).memory_bytes
    # A group's million values from 2 ranks, each rank's half coded alone; 3 blocks and the root.
    wire = 2 * codec.wire_nbytes(500_000, torch.float32)
    assert found.get("kept wire", 0) == groups * wire
    assert "kept wire" not in step(job(**FSDP, **changes)).memory_bytes


def test_a_queue_on_the_wire_counts_as_exposed():
    ops = (
        Op(Compute("forward", 1e12)),
        Op(Message("weights", "dp_shard", "all_gather", 2 * 10**9, 2, 0), (0,)),
        Op(Message("gradients", "dp_shard", "all_gather", 10**9, 2, 0), (0,)),
        Op(Compute("forward", 1e12), (2,)),
    )
    found = play(ops, Flat(), workload_of(job()))
    assert found.step_s == pytest.approx(1 + 2 + 1 + 1)
    assert found.exposed_s == pytest.approx({"gradients": 1.0, "weights": 2.0})


def test_break_even_is_saved_bits_over_extra_seconds():
    assert break_even_bits_per_s(1000, 0.5) == 16_000
    assert break_even_bits_per_s(0, 0.5) is None
    assert break_even_bits_per_s(10, 0.0) == float("inf")


def test_at_the_break_even_speed_both_arms_take_equally_long():
    codec = Blockwise(bits=4, block_size=128)
    common = {"prefetch": 0, "blocking": True} | FSDP
    dense = workload_of(job(**common))
    coded = workload_of(job(weights=(WeightsPhase(1.0, codec),), **common))

    class At(Flat):
        def seconds(self, message):
            return message.sent * 8 / rate

    rate = 1e9
    (arm,) = compare(predict(dense, At()), [predict(coded, At())])
    rate = arm.break_even_bits_per_s
    assert predict(dense, At()).step_s == pytest.approx(predict(coded, At()).step_s, rel=1e-9)


def test_an_idle_wire_saves_up_a_burst():
    # Gathers of 2 s after 3 s of computation each: with a burst of 1.5 s, half a second is left.
    made = job(num_blocks=1, prefetch=0, blocking=True, reshard=False, **FSDP)
    plain = Flat(overrides={"weights": 2.0, "gradients": 0.0})
    bursts = Flat(overrides={"weights": 2.0, "gradients": 0.0}, burst_s=1.5)
    # Root and block are gathered in a row; only the first meets a wire that has rested.
    assert step(made, plain).step_s == pytest.approx(3.0 + 4.0)
    assert step(made, bursts).step_s == pytest.approx(3.0 + 4.0 - 1.5)


def test_messages_after_computation_wake_what_moves_them():
    compute, message = Compute("forward", flops=1e12), Message("weights", "dp_shard", "all_gather",
                                                               10**9, 2, 10**9)  # fmt: skip
    # Computation, two messages in a row, computation, a message: two of three are woken.
    works = (compute, message, message, compute, message)
    ops = [Op(work, after=(i - 1,) if i else ()) for i, work in enumerate(works)]
    end = Op(Compute("optimizer"), after=(len(ops) - 1,))
    made = workload_of(job())
    seconds = play([*ops, end], Flat(), made).step_s
    woken = play([*ops, end], Flat(woken_s=0.25), made)
    assert woken.step_s == pytest.approx(seconds + 2 * 0.25)
    assert woken.exposed_s["weights"] == pytest.approx(3 * 1.0 + 2 * 0.25)
