"""Without a codec, and with an identity codec, converted plans equal torch's own bit for bit."""

import pytest
import torch
from taco_model import loss_of, make_net, make_tokens, sp_plan, tp_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from thinwire import taco
from thinwire.codecs import Cast
from thinwire.comm import Ledger
from thinwire.testing.ranks import run_ranks

PLANS = {"tp": tp_plan, "tp-separate": lambda: tp_plan(share=False), "sp": sp_plan}


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def run(net, batch):
    loss = loss_of(net, batch)
    loss.backward()
    return [loss.detach()] + [full(p.grad) for p in net.parameters()]


@pytest.mark.parametrize("codec", [None, Cast()], ids=repr)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_and_gradients_equal_torchs(plan, num_ranks, codec):
    make_plan, batch = PLANS[plan], make_tokens()

    def fn(rank):
        mesh = init_device_mesh("cpu", (num_ranks,))
        stock, ours = make_net(), make_net()
        parallelize_module(stock, mesh, make_plan())
        taco.parallelize(ours, mesh, make_plan(), codec, ledger=Ledger())
        return run(stock, batch), run(ours, batch)

    for stock, ours in run_ranks(num_ranks, fn):
        for want, got in zip(stock, ours, strict=True):
            assert torch.equal(want, got)
