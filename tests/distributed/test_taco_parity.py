"""Without a codec, and with an identity codec, converted plans equal torch's own bit for bit."""

import pytest
import torch
from taco_model import gradients, make_net, make_tokens, sp_plan, tp_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from thinwire import taco
from thinwire.codecs import Blockwise, Cast
from thinwire.comm import Ledger
from thinwire.testing.ranks import run_ranks

# name -> plan, and whether layers that read one input may share a region without moving bits.
PLANS = {
    "tp": (tp_plan, [None, Cast()]),
    # Sharing the region of q, k and v adds in another order: compared below instead.
    "tp-separate": (lambda: tp_plan(share=False), [None]),
    "sp": (sp_plan, [None, Cast()]),
    "sp-separate": (lambda: sp_plan(share=False), [None]),
}
CASES = [
    (plan, codec, num_ranks, dtype)
    for plan, (_, codecs) in PLANS.items()
    for codec in codecs
    for num_ranks in (2, 4)
    for dtype in (torch.float32, torch.bfloat16)
    # An fp32 sum of four bf16 messages is rounded once, torch's at every step.
    if codec is None or num_ranks == 2 or dtype == torch.float32
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_equal_torchs(case):
    plan, codec, num_ranks, dtype = case
    make_plan, batch = PLANS[plan][0], make_tokens(length=8)

    def fn(rank):
        mesh = init_device_mesh("cpu", (num_ranks,))
        stock, ours = make_net(dtype=dtype, layers=1), make_net(dtype=dtype, layers=1)
        parallelize_module(stock, mesh, make_plan())
        taco.parallelize(ours, mesh, make_plan(), codec, ledger=Ledger())
        return gradients(stock, batch), gradients(ours, batch)

    for stock, ours in run_ranks(num_ranks, fn):
        for name, want in stock.items():
            assert torch.equal(want, ours[name]), name


@pytest.mark.parametrize("make_plan", [tp_plan, sp_plan])
def test_layers_that_read_one_input_share_its_region(make_plan):
    codec, batch = Blockwise(bits=8, block_size=32), make_tokens()

    def fn(rank):
        mesh, results = init_device_mesh("cpu", (2,)), []
        for share in (True, False):
            net, ledger = make_net(), Ledger()
            report = taco.parallelize(net, mesh, make_plan(share=share), codec, ledger=ledger)
            results.append((gradients(net, batch), ledger["tensor"].calls, report.notes))
        return results

    (prepared, calls, notes), (found, found_calls, found_notes) = run_ranks(2, fn)[0]
    assert calls == found_calls
    assert (notes, len(found_notes)) == ([], 4)
    assert "q, k, v share one region" in found_notes[0]
    for name, want in prepared.items():
        assert torch.equal(want, found[name]), name


def test_a_split_model_equals_the_single_process_in_fp64():
    batch = make_tokens()
    want = gradients(make_net(dtype=torch.float64), batch)

    def fn(rank):
        net = make_net(dtype=torch.float64)
        taco.parallelize(net, init_device_mesh("cpu", (4,)), sp_plan(), None)
        return gradients(net, batch)

    got = run_ranks(4, fn)[3]
    for name in want:
        # Softmax takes no notice of a key bias: its gradient is zero but for rounding.
        if not name.endswith("k.bias"):
            assert (got[name] - want[name]).norm() <= 1e-12 * want[name].norm(), name
