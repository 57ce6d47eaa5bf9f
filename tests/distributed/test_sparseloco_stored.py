"""Outer rounds of replicas whose weights are stored quantized: codes, layouts, what is refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.test_sparseloco_ranks import net, train
from thinwire import eco
from thinwire.eco.export import place_whole, rounded, whole_values
from thinwire.errors import ConfigError
from thinwire.sparseloco import DiLoCo, SparseLoCo
from thinwire.testing.ranks import run_ranks

# Each format's name, granularity and the relative error that its spacing allows normal values.
FORMATS = {
    "fp8": ("fp8_e4m3", "row", 2**-4),
    "int8 tensor": ("int8", "tensor", 2 * 5 / 255),
    "int4 tensor": ("int4", "tensor", 2 * 5 / 15),
    "int4 group": ("int4", "group:16", 2 * 5 / 15),
    "bf16": ("bf16", None, 2**-9),
}
NAMES = ("up.weight", "down.weight")
RANKS = {"plain": 1, "fsdp": 2, "tp": 2, "both": 4}


def stored(layout, fmt, **more):
    """Return a model with two stored matrices, on the last two axes of the ranks there are."""
    model = net()
    sizes = (2 if layout in ("fsdp", "both") else 1, 2 if layout in ("tp", "both") else 1)
    mesh = None
    if layout != "plain":
        replicas = torch.distributed.get_world_size() // (sizes[0] * sizes[1])
        names = ("site", "dp", "tp")
        mesh = init_device_mesh("cpu", (replicas, *sizes), mesh_dim_names=names)
    if sizes[1] > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    name, granularity, _ = FORMATS[fmt]
    chosen = lambda full, module, param: full in NAMES  # noqa: E731
    eco.quantize_(model, name, granularity=granularity, filter=chosen, **more)
    if sizes[0] > 1:
        fully_shard(model, mesh=mesh["dp"])
    return model, mesh


def fresh_values():
    generator = torch.Generator().manual_seed(1)
    model = net()
    return {n: torch.randn(model.get_parameter(n).shape, generator=generator) for n in NAMES}


@pytest.mark.parametrize("fmt", FORMATS)
def test_whole_values_go_in_and_out_alike_on_every_layout(fmt):
    fresh, limit = fresh_values(), FORMATS[fmt][2]

    def work(rank, layout):
        model, _ = stored(layout, fmt)
        found = {}
        for name in NAMES:
            p = model.get_parameter(name)
            before = whole_values(p)
            place_whole(p, fresh[name])
            found[name] = whole_values(p)
            assert torch.equal(found[name], rounded(p, fresh[name]))
            place_whole(p, before)
            assert torch.equal(whole_values(p), before)  # on the grid already
        return found

    want = run_ranks(1, lambda rank: work(rank, "plain"))[0]
    for name, x in want.items():
        assert 0 < (x - fresh[name]).norm() < limit * fresh[name].norm()
    for layout in ("fsdp", "tp", "both"):
        for found in run_ranks(RANKS[layout], lambda rank, layout=layout: work(rank, layout)):
            assert all(torch.equal(found[name], want[name]) for name in NAMES)


def eco_adam(model, lr=3e-3):
    trained = [p for p in model.parameters() if p.requires_grad]
    return eco.EcoAdamW(trained, lr=lr)


@pytest.mark.parametrize("fmt", ["fp8", "int4 group"])
@pytest.mark.parametrize("method", ["sparseloco", "diloco"])
def test_replicas_end_rounds_with_equal_codes_and_learn(method, fmt):
    """Two replicas of two FSDP2 ranks each."""

    def work(rank):
        sites = torch.distributed.new_group([0, 2])
        halves = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        model, _ = stored("fsdp", fmt)
        optimizer = eco_adam(model)
        where = {"group": sites, "inner_group": halves[rank // 2], "sync_every": 5}
        if method == "sparseloco":
            outer = SparseLoCo(model, optimizer, **where)
        else:
            outer = DiLoCo(model, optimizer, alpha=0.7, momentum=0.9, **where)
        losses = train(model, optimizer, rank // 2, 60)
        held = {n: whole_values(model.get_parameter(n)) for n in NAMES}
        start = None
        if outer.core is not None:
            start = {n: outer.inner.start(n, outer.core.theta[n]) for n in NAMES}
        return losses, held, start

    results = run_ranks(4, work)
    for losses, held, start in results:
        assert losses[-1] < 0.75 * losses[0]
        for name, x in held.items():
            assert torch.equal(x, results[0][1][name])
            assert start is None or torch.equal(x, start[name])


def test_rounding_of_the_shared_weights_is_no_change():
    """A round without learning sends nothing, though the stored weights are not the shared ones."""

    def work(rank):
        model, _ = stored("plain", "int4 tensor")
        optimizer = eco_adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2)
        train(model, optimizer, rank, 2)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        theta = {n: x.clone() for n, x in outer.core.theta.items()}
        outer.partition.residual.update(
            {n: torch.zeros_like(x) for n, x in outer.partition.residual.items()}
        )
        train(model, optimizer, rank, 2)
        off = theta["up.weight"] - whole_values(model.get_parameter("up.weight"))
        return theta, outer.core.theta, off

    for before, after, off in run_ranks(2, work):
        assert off.abs().max() > 0
        assert all(torch.equal(before[n], after[n]) for n in NAMES)


def test_master_copies_are_refused():
    def work(rank):
        model, _ = stored("plain", "fp8", master=True)
        with pytest.raises(ConfigError, match="keeps a master copy"):
            SparseLoCo(model, eco_adam(model), sync_every=2)
        with pytest.raises(ConfigError, match="keeps a master copy"):
            place_whole(model.get_parameter("up.weight"), fresh_values()["up.weight"])

    run_ranks(2, work)
