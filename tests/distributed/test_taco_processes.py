"""What threads cannot stand in for, over gloo: torch.compile, CommDebugMode, loss parallel."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from taco_model import full, gradients, make_net, make_tokens, sp_plan, tp_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thinwire import _compat, taco
from thinwire.codecs import Hadamard
from thinwire.comm import Ledger
from thinwire.taco import regions
from thinwire.testing.processes import run_processes

CODEC = Hadamard(group=32)
PLANS = {"sp": sp_plan, "tp-separate": lambda: tp_plan(share=False)}


@contextmanager
def sent_dtypes():
    """Collect the dtypes that c10d collectives are given, inside custom ops too."""
    seen = set()
    places = [
        (dist, "all_reduce"),
        (dist, "all_to_all_single"),
        (_compat, "all_gather_single"),
        (_compat, "reduce_scatter_single"),
    ]
    real = [getattr(module, name) for module, name in places]

    def spy(function):
        def call(*args, **kwargs):
            seen.add(args[0].dtype)
            return function(*args, **kwargs)

        return call

    for (module, name), function in zip(places, real, strict=True):
        setattr(module, name, spy(function))
    try:
        yield seen
    finally:
        for (module, name), function in zip(places, real, strict=True):
            setattr(module, name, function)


def no_dense_collective(rank: int) -> dict[str, bool]:
    """Neither pass of a converted block holds a dense collective, recomputed or not."""
    verdicts, batch = {}, make_tokens()
    mesh = init_device_mesh("cpu", (2,))
    for name, make_plan in PLANS.items():
        for recompute in (False, True):
            net = make_net(layers=1)
            plan = {k: v for k, v in make_plan().items() if k.startswith("layers")}
            taco.parallelize(net, mesh, plan, CODEC)
            x = net.embed(batch[0]).detach()
            if name == "sp":
                x = x.chunk(2, 1)[rank]
            x.requires_grad_()
            block = net.layers[0]
            with CommDebugMode() as outside, sent_dtypes() as inside:
                y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
                y.square().sum().backward()
            verdicts[f"comm {name} {recompute}"] = not outside.get_comm_counts()
            verdicts[f"bytes {name} {recompute}"] = inside == {torch.uint8}
    return verdicts


def compiled(rank: int) -> dict[str, bool]:
    """Compiled blocks equal eager ones bit for bit, without a graph break."""
    verdicts, batch = {}, make_tokens()
    mesh = init_device_mesh("cpu", (2,))
    for name, make_plan in PLANS.items():
        torch._dynamo.reset()
        results, ledgers = [], []
        for fast in (False, True):
            net, ledger = make_net(layers=1), Ledger()
            taco.parallelize(net, mesh, make_plan(), CODEC, ledger=ledger)
            if fast:
                net.layers[0].compile(backend="aot_eager", fullgraph=True)
            results.append(gradients(net, batch))
            ledgers.append(ledger.to_dict())
        same = all(torch.equal(results[0][n], results[1][n]) for n in results[0])
        verdicts[f"compiled {name}"] = same
        verdicts[f"ledger {name}"] = ledgers[0] == ledgers[1]
    return verdicts


def inductor(rank: int) -> dict[str, bool]:
    """Regions inside code that Inductor fuses, on several shapes."""
    wire = taco.Link(codec=CODEC).bind(dist.group.WORLD)

    def step(x):
        return regions.reduce_out(regions.copy_in(x * 2, wire) + 1, wire) * 0.5

    fast, verdicts = torch.compile(step, fullgraph=True, dynamic=True), {}
    for shape in ((4, 32), (3, 33), (5, 130)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
        grads, outs = [], []
        for call in (step, fast):
            leaf = x.clone().requires_grad_()
            outs.append(call(leaf))
            outs[-1].square().sum().backward()
            grads.append(leaf.grad)
        verdicts[f"inductor {shape}"] = torch.equal(*outs) and torch.equal(*grads)
    return verdicts


def loss_parallel(rank: int) -> dict[str, bool]:
    net, batch = make_net(), make_tokens()
    plan = sp_plan(head=False)
    plan["head"] = torch_parallel.ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    )
    report = taco.parallelize(net, init_device_mesh("cpu", (2,)), plan, CODEC)
    with torch_parallel.loss_parallel():
        logits = net(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        loss.backward()
    want = gradients(make_net(), batch)
    error = (full(net.head.weight.grad) - want["head.weight"]).norm() / want["head.weight"].norm()
    return {
        "head exact": report.exact == {"head": "output head: left exact"},
        "loss": abs(full(loss).item() / want["loss"].item() - 1) < 0.01,
        "head gradient": error.item() < 0.05,
    }


def cases(rank: int) -> dict[str, bool]:
    verdicts = no_dense_collective(rank) | compiled(rank) | loss_parallel(rank)
    return verdicts | inductor(rank)


@pytest.mark.processes
def test_over_gloo():
    for verdicts in run_processes(2, cases):
        assert all(verdicts.values()), [name for name, good in verdicts.items() if not good]
