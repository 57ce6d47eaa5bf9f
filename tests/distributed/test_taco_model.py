"""Split models: what is sent, what stays exact, odd sizes, recomputation, FSDP2 on another axis."""

from functools import partial

import pytest
import torch
from taco_model import (
    FeedForward,
    full,
    gradients,
    make_net,
    make_tokens,
    relative_errors,
    sp_plan,
    tp_plan,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from thinwire import aquavit, taco
from thinwire.codecs import Blockwise, Cast, Hadamard
from thinwire.comm import Ledger, hierarchy
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.testing.ranks import run_ranks
from thinwire.testing.transport import record_transport

CODEC = Hadamard(group=32)
# Per layer: two all-reduces each way, or two gathers and two scatters each way.
CALLS_PER_LAYER = {tp_plan: 4, sp_plan: 8}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make_plan", [tp_plan, sp_plan])
def test_every_call_is_compressed_counted_and_alike_on_all_ranks(make_plan, num_ranks):
    batch = make_tokens()

    def fn(rank):
        net, ledger = make_net(), Ledger()
        mesh = init_device_mesh("cpu", (num_ranks,))
        report = taco.parallelize(net, mesh, make_plan(), CODEC, ledger=ledger)
        results = gradients(net, batch)
        return results, ledger, report

    with record_transport() as sent:
        ranks = run_ranks(num_ranks, fn)
    want = gradients(make_net(), batch)
    for rank, (results, ledger, _) in enumerate(ranks):
        totals = ledger["tensor"]
        assert "below dense" in ledger.check()
        assert totals.wire_bytes - totals.exempt_bytes == sent[rank].nbytes
        exempt_calls = sum(g.calls for g in ledger.exempt_calls.values())
        assert totals.calls - exempt_calls == 2 * CALLS_PER_LAYER[make_plan]
        for name in ("logits", "norm.weight", "layers.0.n1.weight", "embed.weight"):
            assert torch.equal(results[name], ranks[0][0][name]), name
    errors = relative_errors(ranks[0][0], want)
    assert 1e-3 < errors["logits"] < 2 * 0.036  # bands: test_taco_codecs


def test_the_report_says_what_was_converted_and_what_not():
    class Odd(torch_parallel.ParallelStyle):
        def _apply(self, module, device_mesh):
            return module

    def fn(rank):
        mesh, ledger = init_device_mesh("cpu", (2,)), Ledger()
        plan = sp_plan() | {"layers.*.mlp": Odd()}
        plan["embed"] = torch_parallel.ColwiseParallel(output_layouts=Shard(1))
        with pytest.raises(ConfigError, match=r"(?s)embed: .*all-to-all.*Odd has no compressed"):
            taco.parallelize(make_net(), mesh, plan, CODEC)
        leave = ("embed", "layers.*.mlp")
        report = taco.parallelize(make_net(), mesh, plan, CODEC, ledger=ledger, leave=leave)
        with pytest.raises(ConfigError, match=r"'blocks\.\*\.attn' matches no module"):
            taco.parallelize(make_net(), mesh, {"blocks.*.attn": Odd()}, CODEC)
        with pytest.raises(ConfigError, match="nothing in the plan can be compressed"):
            taco.parallelize(make_net(), mesh, {"norm": Odd()}, CODEC, leave=("norm",))
        with pytest.raises(ConfigError, match="not both"):
            taco.parallelize(make_net(), mesh, tp_plan(), link=taco.Link(), ledger=ledger)
        with pytest.raises(ConfigError, match=r"splits nn\.Linear"):
            taco.parallelize(make_net(), mesh, {"norm": torch_parallel.RowwiseParallel()}, CODEC)
        return report, ledger

    report, ledger = run_ranks(2, fn)[0]
    assert report.converted["layers.1.attn.o"].startswith("RowwiseParallel")
    assert set(report.left_alone) == {"embed", "layers.0.mlp", "layers.1.mlp"}
    assert report.exact == {"head": "output head: left exact"}
    declared = {e.name for e in ledger.exemptions}
    assert {"head", "embed", "norm.weight", "layers.0.n2.bias"} <= declared
    assert "layers.0.mlp: torch's own" in str(report)


def test_settings_are_checked_when_they_are_made():
    for wrong in (
        {"algorithm": "ring"},
        {"nonfinite": "ignore"},
        {"min_bytes": -1},
        {"slices": 0},
        {"codec": None, "backward_codec": CODEC},
    ):
        with pytest.raises(ConfigError):
            taco.Link(**wrong)
    with pytest.raises(ConfigError, match="all-to-all"):
        taco.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(2))
    with pytest.raises(ConfigError, match="all-to-all"):
        taco.ColwiseParallel(output_layouts=Shard(1))


def test_the_size_gate_leaves_small_calls_dense():
    batch = make_tokens()

    def fn(rank):
        net, ledger = make_net(), Ledger()
        link = taco.Link(codec=CODEC, ledger=ledger, min_bytes=10_000)
        taco.parallelize(net, init_device_mesh("cpu", (2,)), tp_plan(), link=link)
        return gradients(net, batch), ledger

    results, ledger = run_ranks(2, fn)[0]
    errors = relative_errors(results, gradients(make_net(), batch))
    assert max(errors.values()) < 1e-4
    (key, gated), *others = ledger.exempt_calls.items()
    assert not others
    assert key == ("tensor", "smaller than min_bytes=10000")
    assert gated.calls == 2 * CALLS_PER_LAYER[tp_plan]


@pytest.mark.parametrize("length", [1, 5, 130])
def test_sequences_that_the_ranks_do_not_divide(length):
    batch = make_tokens(batch=1, length=length)
    dtype = torch.float64
    want = gradients(make_net(dtype=dtype, layers=1), batch)

    def fn(rank):
        mesh, results = init_device_mesh("cpu", (4,)), []
        for codec, kind in ((Cast(), dtype), (CODEC, torch.float32)):
            net = make_net(dtype=kind, layers=1)
            link = taco.Link(codec=codec, uneven=True)
            taco.parallelize(net, mesh, sp_plan(), link=link)
            results.append(gradients(net, batch))
        return results

    exact, quantized = run_ranks(4, fn)[2]
    if length > 1:  # with one token there is nothing to attend to: q and k get no gradient
        assert max(relative_errors(exact, want).values()) < 1e-12
    assert (exact["logits"] - want["logits"]).norm() < 1e-12 * want["logits"].norm()
    assert (quantized["logits"] - want["logits"]).norm() < 0.05 * want["logits"].norm()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_features_that_the_ranks_do_not_divide(num_ranks):
    """Width 33, hidden 70."""
    x = torch.randn(1, 5, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def make():
        torch_net = FeedForward(33, 70, bias=True).double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in torch_net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 6)
        return torch_net

    def run(net):
        inputs = x.clone().requires_grad_()
        net(inputs).square().sum().backward()
        return [inputs.grad] + [full(p.grad) for p in net.parameters()]

    def fn(rank):
        net = make()
        plan = {
            "up": torch_parallel.ColwiseParallel(),
            "gate": torch_parallel.ColwiseParallel(),
            "down": torch_parallel.RowwiseParallel(),
        }
        taco.parallelize(net, init_device_mesh("cpu", (num_ranks,)), plan, Cast())
        return run(net)

    for got, want in zip(run_ranks(num_ranks, fn)[1], run(make()), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


KEEP = torch.ops.thinwire.all_reduce.default


def keep_collectives(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == KEEP else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "none": lambda block, x: block(x),
    "full": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, keep_collectives),
    ),
}


@pytest.mark.parametrize("make_plan", [tp_plan, sp_plan])
def test_recomputation_changes_no_bit_and_its_bytes_show(make_plan):
    """Field case: checkpointing changed numbers or ran wide without a word."""
    batch = make_tokens()

    def fn(rank):
        results = {}
        for name, how in CHECKPOINTS.items():
            net, ledger = make_net(), Ledger()
            mesh = init_device_mesh("cpu", (2,))
            taco.parallelize(net, mesh, make_plan(), CODEC, ledger=ledger)

            def forward(tokens, net=net, how=how):
                x = net.embed(tokens)
                for block in net.layers:
                    x = how(block, x)
                return net.head(net.norm(x))

            results[name] = (gradients(net, batch, forward), ledger["tensor"])
        return results

    results = run_ranks(2, fn)[0]
    want, plain = results["none"]
    for name, (got, totals) in results.items():
        assert all(torch.equal(got[n], want[n]) for n in want), name
        assert totals.compressed_ratio == plain.compressed_ratio
    forward_calls = 4  # 2 per layer
    assert results["full"][1].calls > plain.calls
    assert results["reentrant"][1].calls == plain.calls + forward_calls * (
        2 if make_plan is sp_plan else 1
    )
    if make_plan is tp_plan:
        assert results["selective"][1].calls == plain.calls


def test_tp_beside_fsdp2_and_aquavit_on_a_2x2_mesh():
    """Field case: the TP group had to be the whole world."""

    def fn(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        losses = {}
        for name, codec in (("dense", None), ("compressed", CODEC)):
            net, ledger = make_net(layers=1), Ledger()
            taco.parallelize(net, mesh["tp"], tp_plan(), codec, ledger=ledger)
            for module in (*net.layers, net):
                fully_shard(module, mesh=mesh["dp"])
            schedule = None if codec is None else aquavit.Static(Blockwise(bits=8))
            aquavit.attach(net, schedule, ledger=ledger, min_shard_numel=64)
            opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
            losses[name] = []
            for step in range(4):
                batch = make_tokens(seed=step % 2 * 2 + mesh["dp"].get_local_rank())
                loss = F.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses[name].append(loss.item())
            if codec is not None:
                assert "tensor" in ledger.check()
                assert ledger["weights"].compressed_ratio > 3
                assert ledger["tensor"].calls == 4 * CALLS_PER_LAYER[tp_plan]
                assert ledger["tensor"].compressed_ratio > 3
        return losses

    for losses in run_ranks(4, fn):
        assert losses["compressed"][-1] < losses["compressed"][0]
        for dense, compressed in zip(losses["dense"], losses["compressed"], strict=True):
            assert abs(dense - compressed) < 0.05


def test_tiers_serve_a_model():
    batch = make_tokens()

    def fn(rank):
        net, ledger = make_net(), Ledger()
        mesh = init_device_mesh("cpu", (4,))
        link = taco.Link(codec=CODEC, ledger=ledger, tiers=hierarchy(mesh.get_group(), 2))
        taco.parallelize(net, mesh, tp_plan(), link=link)
        return gradients(net, batch)

    results = run_ranks(4, fn)
    errors = relative_errors(results[0], gradients(make_net(), batch))
    # Three roundings per message, four messages.
    assert 1e-3 < errors["logits"] < 2 * (3 * 5.8e-4) ** 0.5
    assert torch.equal(results[0]["logits"], results[3]["logits"])


@pytest.mark.parametrize("nonfinite", ["raise", "zero", "propagate"])
def test_a_nan_in_an_activation(nonfinite):
    batch = make_tokens()

    def fn(rank):
        net = make_net()
        link = taco.Link(codec=CODEC, nonfinite=nonfinite)
        taco.parallelize(net, init_device_mesh("cpu", (2,)), tp_plan(), link=link)
        if rank == 1:
            with torch.no_grad():
                net.layers[0].mlp.up.bias.to_local()[3] = float("nan")
        try:
            return torch.isfinite(net(batch[0])).all().item()
        except NonFiniteError:
            return "raised"

    expected = {"raise": "raised", "zero": True, "propagate": False}[nonfinite]
    assert run_ranks(2, fn) == [expected] * 2


def test_plans_may_hold_our_styles_and_reach_torchs_own_call():
    batch, link = make_tokens(), taco.Link(codec=CODEC)

    def fn(rank):
        mesh, nets = init_device_mesh("cpu", (2,)), [make_net(), make_net()]
        taco.parallelize(nets[0], mesh, tp_plan(), CODEC)
        plan = {}
        for inner, columns, row in (("attn", "qkv", "o"), ("mlp", ("up", "gate"), "down")):
            plan[f"layers.*.{inner}"] = taco.PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Replicate(), link=link
            )
            plan |= {f"layers.*.{inner}.{c}": taco.ColwiseParallel(link=link) for c in columns}
            plan[f"layers.*.{inner}.{row}"] = taco.RowwiseParallel(link=link)
        torch_parallel.parallelize_module(nets[1], mesh, plan)
        return [gradients(net, batch) for net in nets]

    first, second = run_ranks(2, fn)[0]
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_outputs_prepared_for_the_next_module():
    """PrepareModuleOutput: partial to whole and to pieces, pieces to whole."""

    def fn(rank):
        mesh = init_device_mesh("cpu", (2,))
        wholes = []
        for dst in (Replicate(), Shard(0)):
            net = nn.Sequential(nn.Identity())
            style = torch_parallel.PrepareModuleOutput(
                output_layouts=Shard(1), desired_output_layouts=Replicate()
            )
            taco.parallelize(net, mesh, {"0": style}, Cast())
            x = torch.full((2, 3), float(rank), requires_grad=True)
            y = net(x)
            y.backward(torch.arange(12.0).view(2, 6))
            wholes.append((y.detach(), x.grad))
            assert dst is not None
        return wholes

    for rank, wholes in enumerate(run_ranks(2, fn)):
        for y, grad in wholes:
            assert torch.equal(y, torch.tensor([[0.0] * 3 + [1.0] * 3] * 2))
            assert torch.equal(grad, torch.arange(12.0).view(2, 6)[:, 3 * rank : 3 * rank + 3])
