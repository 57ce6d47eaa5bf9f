"""Virtual ranks compute what real ones do: the same messages, the same gradients."""

import pytest
import torch
from taco_model import gradients, make_net, make_tokens, sp_plan, tp_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from thinwire import taco
from thinwire.codecs import Cast, Hadamard, Tensorwise
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.testing.ranks import run_ranks

# In fp64 only identity codecs travel; in fp32 a sum in another order moves a few codes.
LINKS = {
    "dense": taco.Link(codec=None),
    "identity": taco.Link(codec=Cast()),
    "e4m3": taco.Link(codec=Hadamard(group=32)),
    "rotated": taco.Link(codec=Hadamard(group=32, middle="rotated")),
    "mixed": taco.Link(codec=Hadamard(fmt="int8"), backward_codec=Hadamard(fmt="e5m2")),
    "per tensor": taco.Link(codec=Tensorwise(), algorithm="two_shot"),
    "gated": taco.Link(codec=Hadamard(), min_bytes=10**6),
}


def plan_of(make_plan):
    return {k: v for k, v in make_plan().items() if k.startswith("layers")}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make_plan", [tp_plan, sp_plan])
@pytest.mark.parametrize("name", LINKS)
def test_virtual_ranks_equal_real_ones(name, make_plan, num_ranks):
    batch, link = make_tokens(length=8), LINKS[name]
    quantizes = name in ("e4m3", "rotated", "mixed", "per tensor")

    def fn(rank):
        net = make_net(layers=1)
        plan = make_plan()
        plan = plan if make_plan is sp_plan else plan_of(lambda: plan)
        taco.parallelize(net, init_device_mesh("cpu", (num_ranks,)), plan, link=link)
        return gradients(net, batch)

    real = run_ranks(num_ranks, fn)[0]
    net = make_net(layers=1)
    taco.simulate(net, plan_of(make_plan), link, num_ranks=num_ranks)
    virtual = gradients(net, batch)
    exact = gradients(make_net(layers=1), batch)
    for key, want in real.items():
        if key.endswith("k.bias"):
            continue
        off = (virtual[key] - want).norm() / want.norm()
        assert off < (5e-3 if quantizes else 2e-5), key
        if quantizes and key != "loss":
            # Far closer to the real ranks than either is to the exact value.
            assert off < 0.34 * (want - exact[key]).norm() / want.norm(), key


def test_policies_and_refusals():
    plan, batch = plan_of(tp_plan), make_tokens()
    net = make_net()
    taco.simulate(net, plan, taco.Link(codec=Hadamard()), num_ranks=2)
    with torch.no_grad():
        net.layers[0].mlp.up.bias[0] = float("nan")
    with pytest.raises(NonFiniteError):
        net(batch[0])

    class Odd(ParallelStyle):
        def _apply(self, module, device_mesh):
            return module

    for wrong, message in (
        ({"norm": Odd()}, "Odd cannot be simulated"),
        ({"layers.*.attn.q": ColwiseParallel()}, "PrepareModuleInput in front"),
    ):
        with pytest.raises(ConfigError, match=message):
            taco.simulate(make_net(), wrong, taco.Link(), num_ranks=2)
    with pytest.raises(ConfigError, match="divisible by 3"):
        taco.simulate(make_net(), plan, taco.Link(), num_ranks=3)
