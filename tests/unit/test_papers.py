"""The arithmetic of benchmarks/papers.py: the traffic's bounds hold, and constants are one set."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.plan import workload_of
from thinwire.plan.job import WeightsPhase

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "papers.py"


@pytest.fixture(scope="module")
def papers():
    spec = importlib.util.spec_from_file_location("papers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["papers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["papers"]


def traffic(made):
    sent = workload_of(made).sent()
    return sent["weights"], sent["gradients"]


def test_zero_3_sends_three_times_the_16_bit_model(papers):
    made = papers.job("LLaMA-3.3-70B", 256, {"dp_shard": 256},
                      {"batch_seqs": 256, "micro_batches": 1, "seq_len_tokens": 512})  # fmt: skip
    assert made.params == 70_553_706_496
    weights, gradients = traffic(made)
    whole = 2 * made.params * 255 / 256
    assert weights == pytest.approx(2 * whole, rel=1e-3)
    assert gradients == pytest.approx(whole, rel=1e-3)


def test_the_arms_of_aquavit_have_the_bounds_of_their_bits(papers):
    data = {"batch_seqs": 1024, "micro_batches": 4, "seq_len_tokens": 512}
    zero = papers.job("LLaMA-3.3-70B", 256, {"dp_shard": 256}, data)
    coded = papers.job("LLaMA-3.3-70B", 256, {"dp_shard": 256}, data, base="aquavit")

    def bound(every, **options):
        dense = sum(traffic(replace(zero, reduce_every_micro_batch=every)))
        return dense / sum(traffic(replace(coded, reduce_every_micro_batch=every, **options)))

    # At 5.76 bits a weight: 48/(2 b + 16), and (4 * 32 + 16)/(4 * 2 b + 16).
    assert bound(True) == pytest.approx(48 / (2 * 5.764 + 16), rel=0.01)
    assert bound(False) == pytest.approx(144 / (8 * 5.764 + 16), rel=0.01)


def test_a_second_copy_leaves_backward_gathers_inside_the_node(papers):
    data = {"batch_seqs": 256, "micro_batches": 1, "seq_len_tokens": 512}
    zero = papers.job("LLaMA-3.3-70B", 256, {"dp_shard": 256}, data)
    near = workload_of(replace(zero, node_size=8, second_copy=True))
    inside = [op.work for op in near.phases[0].ops if getattr(op.work, "axis", "") == "node"]
    assert len(inside) == 81  # the blocks and what lies around them
    assert sum(m.nbytes for m in inside) == pytest.approx(2 * zero.params / 8, rel=1e-6)


def test_slow_links_give_the_traffic_ratio_and_fast_ones_none(papers):
    data = {"batch_seqs": 256, "micro_batches": 1, "seq_len_tokens": 512}
    zero = papers.job("LLaMA-3.3-70B", 256, {"dp_shard": 256}, data)
    from thinwire.codecs import Blockwise

    half = replace(zero, weights=(WeightsPhase(1.0, Blockwise(bits=8, block_size=2048)),))

    def ratio(gbit):
        on = papers.cluster("V100", 32, 8, gbit)
        return papers.step(zero, on).step_s / papers.step(half, on).step_s

    assert ratio(0.1) == pytest.approx(48 / (16 + 16), rel=0.02)
    assert ratio(10_000) < 1.05


def test_an_exchange_over_a_store_is_one_message_up_and_all_others_down(papers):
    # 1 GB at 100 MB/s up, then 19 GB at 500 MB/s down.
    assert papers.exchange_s(10**9, 20, 0.8, 4.0) == pytest.approx(10 + 38, abs=0.2)


def test_the_72b_message_is_the_published_size(papers):
    nbytes = papers.message_bytes("LLaMA-3.3-70B, 72B with its vocabulary")
    assert nbytes == pytest.approx(1.97e9, rel=0.02)


def test_rows_say_claim_and_error(papers):
    rows = papers.sparseloco_rows()
    assert {row.paper for row in rows} == {"SparseLoCo"}
    row = rows[0]
    assert row.error == row.predicted / 70.0 - 1
