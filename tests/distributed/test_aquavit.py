"""Compressed weight gathers on FSDP2: same bits everywhere, exact bytes, field cases W1 to W10."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.fsdp_models import Net, build, loss_of, train
from thinwire import _compat, aquavit
from thinwire.aquavit import Difference, Schedule, Static
from thinwire.codecs import Blockwise, Cast
from thinwire.comm import Ledger
from thinwire.comm.ledger import all_gather_sent
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError
from thinwire.testing.ranks import run_ranks
from thinwire.testing.transport import record_transport

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SIX = Static(Blockwise(bits=6, block_size=32, pad_to=1024))


def mesh_of(num_ranks: int):
    return init_device_mesh("cpu", (num_ranks,))


class Spy:
    """Record a copy of every gather's output, per module, in order."""

    def __init__(self, model: nn.Module, poison: bool = False):
        self.comms: dict[str, Any] = {}
        self.outputs: dict[str, list[torch.Tensor]] = {}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                comm = module._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm
                self.comms[comm.name] = comm
                module.set_custom_all_gather(self._wrap(comm, poison))

    def _wrap(self, comm: Any, poison: bool) -> Any:
        outputs = self.outputs.setdefault(comm.name, [])

        class Wrapper(_compat.AllGather):
            def allocate(self, size, *, dtype, device):
                out = comm.allocate(size, dtype=dtype, device=device)
                return out.fill_(float("nan")) if poison else out

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                work = comm(output_tensor, input_tensor, group, async_op)
                outputs.append(output_tensor.clone())
                return work

        return Wrapper()


def expected_output(comm: Any, codec: Any, num_ranks: int) -> torch.Tensor:
    """Return what a gather must give, from every rank's shard, by plain collectives."""
    rows = []
    for segment in comm.segments:
        shard = _compat.fsdp_param_data(segment.param)
        full = shard.new_empty(num_ranks, shard.numel())
        _compat.all_gather_single(full.view(-1), shard)
        if segment.reason is None:
            full = torch.stack([codec.decode(codec.encode(r), r.numel(), r.dtype) for r in full])
        rows.append(full)
    return torch.cat(rows, 1).view(-1)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_gather_is_the_decoded_shards_of_all_ranks(num_ranks):
    """Also W3 (buffers poisoned with NaN never show), W5 (odd sizes), W7 (stale after a step)."""

    def fn(rank):
        model = build(mesh_of(num_ranks))
        aquavit.attach(model, SIX, min_shard_numel=0)
        spy = Spy(model, poison=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for step in range(3):
            wants = {
                name: expected_output(comm, SIX.codec, num_ranks)
                for name, comm in spy.comms.items()
            }
            loss_of(model, step, rank).backward()
            for name, outputs in spy.outputs.items():
                assert len(outputs) == (1 if name == "" else 2)  # forward, and backward again
                assert all(torch.equal(out, wants[name]) for out in outputs)
                outputs.clear()
            optimizer.step()
            optimizer.zero_grad()
            seen += wants.values()
        return seen

    first, *others = run_ranks(num_ranks, fn)
    assert all(torch.isfinite(want).all() for want in first)
    assert not torch.equal(first[0], first[len(first) // 3])
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_w1_every_width_carries_every_compute_dtype(bits, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    def fn(rank):
        model = build(mesh_of(2), mp_policy=policy)
        ledger = Ledger()
        codec = Blockwise(bits=bits, block_size=64)
        aquavit.attach(model, Static(codec), min_shard_numel=0, ledger=ledger)
        losses = train(model, rank, 2)
        assert all(torch.isfinite(x) for x in losses)
        ledger.check()

    run_ranks(2, fn)


def test_bytes_of_a_static_run_are_exact():
    """W5 and contract 2: the ratio of the quantized part is 16 / (6 + 32/G) with bf16 gathers."""
    dim, num_ranks = 64, 2

    def fn(rank):
        model = nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, dim))
        for layer in model:
            fully_shard(layer, mesh=mesh_of(num_ranks), mp_policy=BF16)
        fully_shard(model, mesh=mesh_of(num_ranks), mp_policy=BF16)
        ledger = Ledger()
        codec = Blockwise(bits=6, block_size=1024)
        aquavit.attach(model, Static(codec), min_shard_numel=0, ledger=ledger)
        model(torch.ones(1, dim)).sum().backward()
        return ledger

    with record_transport() as sent:
        ledgers = run_ranks(num_ranks, fn)
    for rank, ledger in enumerate(ledgers):
        weights = ledger["weights"]
        assert weights.wire_bytes == sent[rank].nbytes
        assert weights.compressed_ratio == 16 / (6 + 32 / 1024)
        shard, bias = dim * dim // num_ranks, dim // num_ranks
        per_gather = all_gather_sent(shard * 6 // 8 + shard * 4 // 1024 + 2 * bias, num_ranks)
        assert weights.wire_bytes == per_gather * weights.calls
        assert weights.exempt_bytes == all_gather_sent(2 * bias, num_ranks) * weights.calls
        assert {e.name for e in ledger.exemptions} == {"0.bias", "1.bias"}
        assert {e.reason for e in ledger.exemptions} == {"fewer than 2 dimensions"}


def test_w6_a_rank_that_owns_nothing_takes_part():
    def fn(rank):
        model = nn.Sequential(nn.Linear(9, 1), nn.Linear(1, 9))
        fully_shard(model, mesh=mesh_of(4))
        aquavit.attach(model, SIX, min_shard_numel=0)
        x = torch.ones(2, 9)
        out = model(x)
        out.sum().backward()
        return out.detach()

    outs = run_ranks(4, fn)
    assert all(torch.equal(outs[0], o) for o in outs)


def test_w2_evaluation_can_use_gathered_or_master_weights():
    def fn(rank):
        model = build(mesh_of(2))
        handle = aquavit.attach(model, Static(Blockwise(bits=8)), min_shard_numel=0)
        train(model, rank, 5)
        with torch.no_grad():
            gathered = loss_of(model, 99, rank)
            model.reshard()
            with handle.full_precision():
                master = loss_of(model, 99, rank)
                model.reshard()
        return gathered, master

    for gathered, master in run_ranks(2, fn):
        assert torch.isfinite(gathered)
        assert torch.isfinite(master)
        assert gathered != master
        torch.testing.assert_close(gathered, master, rtol=0.05, atol=0.05)


def test_w7_edits_between_steps_are_gathered_fresh():
    def fn(rank):
        model = build(mesh_of(2))
        aquavit.attach(model, SIX, min_shard_numel=0)
        with torch.no_grad():
            before = loss_of(model, 0, rank)
            model.reshard()
            for p in model.parameters():
                p.mul_(1.5)
            after = loss_of(model, 0, rank)
        return before, after

    for before, after in run_ranks(2, fn):
        assert before != after


def test_w8_what_cannot_work_is_refused_at_set_up():
    def plain(rank):
        with pytest.raises(ConfigError, match="fully_shard before attach"):
            aquavit.attach(nn.Linear(3, 3), SIX)

    def nothing(rank):
        model = build(mesh_of(2))
        with pytest.raises(ConfigError, match=r"no parameter .*min_shard_numel"):
            aquavit.attach(model, SIX)

    def option(rank):
        with pytest.raises(ConfigError, match="keep_wire must be one of"):
            aquavit.attach(build(mesh_of(2)), SIX, keep_wire="always")

    def disagree(rank):
        model = build(mesh_of(2))
        with pytest.raises(ConfigError, match="different settings"):
            aquavit.attach(model, Schedule(100 + rank), min_shard_numel=0)

    for case in (plain, nothing, option, disagree):
        run_ranks(2, case)


def test_w8_tied_embeddings_in_one_group_are_sent_once():
    def fn(rank):
        model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40, bias=False))
        model[1].weight = model[0].weight
        fully_shard(model, mesh=mesh_of(2))
        ledger = Ledger()
        aquavit.attach(model, SIX, min_shard_numel=0, ledger=ledger)
        model(torch.arange(8)).sum().backward()
        assert ledger["weights"].dense_bytes == 40 * 16 // 2 * 4 * ledger["weights"].calls

    run_ranks(2, fn)


@pytest.mark.parametrize("keep_wire", ["none", "forward", "accumulate"])
def test_w9_two_forwards_before_a_backward(keep_wire):
    def fn(rank):
        losses = {}
        for name, schedule in (("dense", None), ("identity", Static(Cast()))):
            model = build(mesh_of(2))
            aquavit.attach(model, schedule, min_shard_numel=0, keep_wire=keep_wire)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses[name] = []
            for step in range(3):
                first, second = loss_of(model, step, rank), loss_of(model, step + 50, rank)
                (first + second).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name] += [first.detach(), second.detach()]
        return losses

    for losses in run_ranks(2, fn):
        assert all(map(torch.equal, losses["dense"], losses["identity"]))


def test_w10_frozen_parameters_travel_raw_and_train_not():
    def fn(rank):
        model = build(mesh_of(2))
        for p in model.blocks.parameters():
            p.requires_grad_(False)
        ledger = Ledger()
        aquavit.attach(model, SIX, min_shard_numel=0, ledger=ledger)
        frozen = [p.to_local().clone() for p in model.blocks.parameters()]
        train(model, rank, 2)
        assert all(map(torch.equal, frozen, (p.to_local() for p in model.blocks.parameters())))
        reasons = {e.name: e.reason for e in ledger.exemptions}
        assert reasons["blocks.0.up.weight"] == "frozen"
        return model.state_dict()["blocks.0.up.weight"].full_tensor().shape

    assert run_ranks(2, fn)[0] == (65, 33)


@pytest.mark.parametrize(
    ("keep_wire", "accumulate", "gathers_per_step"),
    # Two blocks gather for forward and for backward, the root stays gathered; per micro-step.
    [("none", 1, 5), ("forward", 1, 3), ("none", 3, 15), ("forward", 3, 9), ("accumulate", 3, 3)],
)
def test_keep_wire_saves_gathers_and_changes_no_bit(keep_wire, accumulate, gathers_per_step):
    def run(rank, policy):
        model = build(mesh_of(2))
        ledger = Ledger()
        schedule = Schedule(4)
        handle = aquavit.attach(model, schedule, min_shard_numel=0, ledger=ledger, keep_wire=policy)
        losses = train(model, rank, 4, accumulate=accumulate)
        return losses, ledger["weights"].calls, handle.metrics()

    for rank_result in run_ranks(2, lambda r: (run(r, "none"), run(r, keep_wire))):
        (plain, _, _), (kept, calls, metrics) = rank_result
        assert all(map(torch.equal, plain, kept))
        assert calls == 4 * gathers_per_step
        assert ("kept_wire_bytes" in metrics) == (keep_wire != "none")


def test_the_shard_is_encoded_once_per_step(monkeypatch):
    counts: dict[int, int] = {}
    real = Blockwise.encode

    def counting(self, x, *, out=None):
        counts[dist.get_rank()] = counts.get(dist.get_rank(), 0) + 1
        return real(self, x, out=out)

    monkeypatch.setattr(Blockwise, "encode", counting)

    def fn(rank):
        model = build(mesh_of(2))
        handle = aquavit.attach(model, SIX, min_shard_numel=0)
        train(model, rank, 2, accumulate=3)
        quantized = [s for g in handle.gathers.values() for s in g.segments if s.reason is None]
        return len(quantized)

    quantized = run_ranks(2, fn)[0]
    assert counts == {0: 2 * quantized, 1: 2 * quantized}


def test_weights_edited_under_a_kept_wire_raise():
    def fn(rank):
        model = build(mesh_of(2))
        handle = aquavit.attach(model, SIX, min_shard_numel=0, keep_wire="accumulate")
        loss_of(model, 0, rank).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        with pytest.raises(ConfigError, match=r"handle\.refresh"):
            loss_of(model, 1, rank)
        handle.refresh()

    run_ranks(2, fn)


def test_the_level_follows_the_optimizer_and_resumes():
    def fn(rank):
        model = build(mesh_of(2))
        handle = aquavit.attach(model, Schedule(10), min_shard_numel=0)
        bits = []
        train(model, rank, 6, after_step=lambda step: bits.append(handle.metrics()["bits"]))
        assert handle.step == 6
        assert bits == sorted(bits)
        again = aquavit.attach(build(mesh_of(2)), Schedule(10), min_shard_numel=0)
        again.load_state_dict(handle.state_dict())
        assert (again.step, again.level) == (6, handle.level)
        longer = aquavit.attach(build(mesh_of(2)), Schedule(1000), min_shard_numel=0)
        longer.load_state_dict(handle.state_dict())
        assert longer.level == handle.level
        other = aquavit.attach(build(mesh_of(2)), Schedule(10, c=2.0), min_shard_numel=0)
        with pytest.raises(CheckpointError, match="c"):
            other.load_state_dict(handle.state_dict())

    run_ranks(2, fn)


def test_a_module_may_have_its_own_level_but_not_descend():
    def fn(rank):
        model = build(mesh_of(2))
        own = {"blocks.0": (8, 64)}
        handle = aquavit.attach(
            model, Schedule(10), min_shard_numel=0, level_for=lambda step, name: own.get(name)
        )
        loss_of(model, 0, rank).backward()
        assert handle.codec_for("blocks.0").bits == 8
        assert handle.codec_for("blocks.1").bits == 2
        own["blocks.0"] = (4, 64)
        with pytest.raises(ConfigError, match=r"lowered module 'blocks\.0'"):
            handle.codec_for("blocks.0")

    run_ranks(2, fn)


@pytest.mark.parametrize("error_feedback", [False, True])
def test_compressed_gradients_stay_close_to_dense_ones(error_feedback):
    def fn(rank):
        grads, ledgers = [], []
        for codec in (None, Blockwise(bits=8, block_size=32)):
            model = build(mesh_of(3))
            ledgers.append(Ledger())
            aquavit.attach(
                model,
                None,
                gradients=codec,
                error_feedback=error_feedback,
                min_shard_numel=0,
                ledger=ledgers[-1],
            )
            loss_of(model, 0, rank).backward()
            grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
        ledgers[1].check()
        return grads, ledgers

    for (dense, ours), ledgers in run_ranks(3, fn):
        for name, grad in dense.items():
            if grad.dim() == 1:
                torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-7)
            error = (ours[name] - grad).norm() / grad.norm()
            assert error < 0.02, name
        assert ledgers[1]["gradients"].wire_bytes < 0.5 * ledgers[0]["gradients"].wire_bytes
        assert ledgers[1]["gradients"].dense_bytes == ledgers[0]["gradients"].dense_bytes


def test_error_feedback_conserves_the_gradient():
    """The sum of what was delivered plus what is owed equals the sum of the true gradients."""
    numel, num_ranks = 4 * 64, 2

    def fn(rank):
        model = nn.Linear(64, 8, bias=False)
        fully_shard(model, mesh=mesh_of(num_ranks))
        handle = aquavit.attach(
            model,
            None,
            gradients=Blockwise(bits=2, block_size=32),
            error_feedback=True,
            min_shard_numel=0,
        )
        reduce = next(iter(handle.reduces.values()))
        delivered, true = torch.zeros(numel), torch.zeros(num_ranks * numel)
        for step in range(20):
            grad = torch.randn(
                num_ranks * numel, generator=torch.Generator().manual_seed(step + rank)
            )
            out = torch.empty(numel)
            reduce(out, grad.clone(), dist.group.WORLD, dist.ReduceOp.SUM)
            delivered += out
            true += grad
        dist.all_reduce(true)
        owed = reduce.residual.clone()
        dist.all_reduce(owed)
        mine = true.view(num_ranks, -1)[rank]
        torch.testing.assert_close(delivered + owed[rank], mine, rtol=1e-4, atol=1e-4)

    run_ranks(num_ranks, fn)


def test_a_nan_weight_raises_on_every_rank():
    def fn(rank):
        model = build(mesh_of(2))
        aquavit.attach(model, SIX, min_shard_numel=0)
        if rank == 1:
            with torch.no_grad():
                next(iter(model.blocks.parameters())).grad = None
                model.blocks[0].up.weight.to_local()[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match="All ranks raise"):
            loss_of(model, 0, rank)

    run_ranks(2, fn)


def test_layer_errors_match_the_codec():
    def fn(rank):
        model = build(mesh_of(2))
        handle = aquavit.attach(model, SIX, min_shard_numel=0)
        errors = handle.layer_errors()
        assert set(errors) == {n for n, p in model.named_parameters() if p.dim() > 1}
        return errors

    first, second = run_ranks(2, fn)
    assert first == second
    assert all(1e-5 < e < 2e-3 for e in first.values())


def test_ledger_off_means_no_gradient_hook():
    """X2: without a ledger and without compressed gradients the reduce-scatter is torch's own."""

    def fn(rank):
        model = build(mesh_of(2))
        aquavit.attach(model, SIX, min_shard_numel=0)
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        assert type(group._reduce_scatter_comm).__name__ == "DefaultReduceScatter"

    run_ranks(2, fn)


def test_hsdp_replicas_agree():
    def fn(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = build(mesh)
        ledger = Ledger()
        aquavit.attach(model, Schedule(3), min_shard_numel=0, ledger=ledger)
        train(model, rank, 3)
        ledger.check()
        return [p.to_local().clone() for p in model.parameters()]

    params = run_ranks(4, fn)
    assert all(map(torch.equal, params[0], params[2]))
    assert all(map(torch.equal, params[1], params[3]))


def test_weight_differences_follow_the_masters():
    """One message per step; what encoding lost comes back, so the error stays that of one step."""

    def fn(rank):
        model = build(mesh_of(2))
        ledger = Ledger()
        codec = Blockwise(bits=4, block_size=128)
        handle = aquavit.attach(model, Difference(codec), min_shard_numel=0, ledger=ledger)
        train(model, rank, 6)
        assert ledger["weights"].calls == 3 * 6  # root and two blocks, none for backward
        comm = handle.gathers["blocks.0"]
        loss_of(model, 9, rank)
        masters = comm._masters()
        error = (comm._weights_RN[rank] - masters).norm() / masters.norm()
        return error, comm._weights_RN.clone()

    (error, first), (_, second) = run_ranks(2, fn)
    assert torch.equal(first, second)
    assert 0 < error < 0.01


@pytest.mark.parametrize(
    "schedule",
    [SIX, Schedule(6), Difference(Blockwise(bits=4, block_size=128))],
    ids=["static", "ascending", "difference"],
)
def test_a_simulated_run_is_the_sharded_run(schedule):
    """One process with virtual shards gives the losses of three ranks, up to the sum's order."""
    num_ranks, steps = 3, 6

    def fn(rank):
        model = build(mesh_of(num_ranks))
        handle = aquavit.attach(model, schedule, min_shard_numel=0)
        losses = train(model, rank, steps)
        return losses, handle.metrics()["bits"]

    sharded = run_ranks(num_ranks, fn)
    torch.manual_seed(0)
    model = Net()
    originals = {id(p) for p in model.parameters()}
    handle = aquavit.simulate(model, schedule, num_ranks=num_ranks, min_shard_numel=0)
    assert {id(p) for p in model.parameters()} == originals
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        losses = [loss_of(model, step, rank) for rank in range(num_ranks)]
        (sum(losses) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, loss in enumerate(losses):
            torch.testing.assert_close(loss, sharded[rank][0][step], rtol=2e-3, atol=2e-3)
    assert handle.metrics()["bits"] == sharded[0][1]
    assert set(handle.layer_errors()) == {n for n, p in Net().named_parameters() if p.dim() > 1}


def test_stochastic_rounding_agrees_over_gathers_and_ranks_and_moves_with_the_step():
    def fn(rank):
        model = build(mesh_of(2))
        handle = aquavit.attach(model, Schedule(10), min_shard_numel=0, rounding="stochastic")
        spy = Spy(model)
        seen = []
        for step in range(2):
            handle.set_step(5 + step)  # the level may stay, the random numbers must not
            loss_of(model, 0, rank).backward()
            forward, backward = spy.outputs["blocks.0"]
            assert torch.equal(forward, backward)
            seen.append(forward)
            for outputs in spy.outputs.values():
                outputs.clear()
        return seen

    first, second = run_ranks(2, fn)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(*first)
