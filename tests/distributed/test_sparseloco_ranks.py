"""SparseLoCo around inner optimizers on thread ranks: learning, layouts, bytes, faults, resume."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from thinwire import Ledger
from thinwire.errors import CheckpointError, ConfigError, ContractError
from thinwire.sparseloco import (
    GroupTransport,
    Options,
    Partition,
    SparseLoCo,
    message_nbytes,
    run_round,
)
from thinwire.testing.ranks import run_ranks
from thinwire.testing.transport import record_transport

DIM, VOCAB = 64, 96
LOCK = threading.Lock()


class Net(nn.Module):
    """One compressed matrix of each kind, norms, a tied head and a frozen table."""

    def __init__(self, dtype=torch.float32, tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.frozen = nn.Parameter(torch.ones(DIM, DIM), requires_grad=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x)


def net(seed=0, **more):
    with LOCK:
        torch.manual_seed(seed)
        return Net(**more)


def loss_of(model, replica, step, rows=4):
    generator = torch.Generator().manual_seed(1000 * replica + step)
    tokens = torch.randint(0, VOCAB, (rows, 16), generator=generator)
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ((5 * tokens + 7) % VOCAB).flatten())


def train(model, optimizer, replica, steps, start=0, outer=None):
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, replica, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model, lr=3e-3):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def weights(model):
    return {n: full(p) for n, p in model.named_parameters()}


def full(p):
    p = p.detach()
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()


def test_replicas_learn_and_end_rounds_bit_equal():
    def work(rank):
        model, ledger = net(), Ledger()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=5, ledger=ledger)
        losses = train(model, optimizer, rank, 60)
        return losses, weights(model), outer, ledger

    results = run_ranks(3, work)
    for losses, held, outer, _ in results:
        assert losses[-1] < 0.6 * losses[0]
        assert outer.rounds == {"committed": 12, "aborted": 0, "left_out": 0}
        assert outer.metrics()["accepted"] == [0, 1, 2]
        for name, x in held.items():
            assert torch.equal(x, results[0][1][name])
        if outer.steps == 0:
            assert all(torch.equal(outer.core.theta[n], held[n]) for n in outer.core.theta)
    residuals = [r[2].partition.residual["up.weight"] for r in results]
    assert not torch.equal(residuals[0], residuals[1])


def test_ledger_counts_messages_and_votes():
    def work(rank):
        model, ledger = net(), Ledger()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2, ledger=ledger)
        train(model, optimizer, rank, 4)
        return outer.last, ledger

    shapes = {n: p.shape for n, p in net().named_parameters() if p.requires_grad}
    votes = 4 + 1 + 1 + 32
    for outcome, ledger in run_ranks(3, work):
        sent = message_nbytes(shapes) + votes
        assert outcome.sent_bytes == sent
        assert outcome.received_bytes == 2 * sent
        books = ledger["outer"]
        assert books.wire_bytes == 2 * 2 * sent
        numel = sum(torch.Size(s).numel() for s in shapes.values())
        assert books.dense_bytes == 2 * (2 * 4 * numel * 2 // 3)
        dense = 2 * sum(torch.Size(s).numel() for s in shapes.values() if len(s) < 2)
        assert books.exempt_bytes == 2 * 2 * dense
        assert "outer" in ledger.check()
        assert {e.name for e in ledger.exemptions} == {n for n, s in shapes.items() if len(s) < 2}


def test_ledger_equals_the_bytes_on_the_transport():
    def work(rank):
        model, ledger = net(), Ledger()
        optimizer = adam(model)
        SparseLoCo(model, optimizer, sync_every=2, ledger=ledger)
        train(model, optimizer, rank, 6)
        return ledger["outer"].wire_bytes + ledger["scalars"].wire_bytes

    with record_transport() as sent:
        booked = run_ranks(3, work)
    assert [sent[r].nbytes for r in range(3)] == booked


def test_one_replica_without_compression_is_inner_training():
    """Field case H3, through the user's interface."""

    def work(rank):
        model, plain = net(), net()
        optimizer, alone = adam(model), adam(plain)
        options = Options(k=4096, quant="none")
        SparseLoCo(model, optimizer, sync_every=3, options=options)
        return train(model, optimizer, 0, 9), train(plain, alone, 0, 9)

    ((outer, inner),) = run_ranks(1, work)
    assert outer == pytest.approx(inner, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_parameters_have_a_32_bit_master(dtype):
    def work(rank):
        model = net(dtype=dtype)
        optimizer = adam(model, lr=0.0)
        outer = SparseLoCo(model, optimizer, sync_every=1)
        before = weights(model)
        train(model, optimizer, rank, 2)
        assert all(torch.equal(before[n], x) for n, x in weights(model).items())
        assert not any(e.any() for e in outer.partition.residual.values())
        optimizer.param_groups[0]["lr"] = 1e-3
        train(model, optimizer, rank, 2)
        return outer.core.theta, weights(model)

    for theta, held in run_ranks(2, work):
        assert all(x.dtype == torch.float32 for x in theta.values())
        assert all(torch.equal(theta[n].to(dtype), held[n]) for n in theta)


def test_frozen_and_tied_parameters():
    def work(rank):
        model = net(tied=True)
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2)
        train(model, optimizer, rank, 2)
        return outer

    names = [r.name for r in run_ranks(2, work)[0].partition.table.records]
    assert "embed.weight" in names
    assert not {"head.weight", "frozen"} & set(names)


# -- replicas with ranks inside ----------------------------------------------------------------


def shard(model, ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))["shard"]
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    return model


def test_replicas_of_two_fsdp_ranks_equal_whole_replicas():
    def alone(rank):
        model = net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        outer = SparseLoCo(model, optimizer, sync_every=2)
        train(model, optimizer, rank, 4)
        return weights(model), outer.last

    def sharded(rank):
        model = shard(net(), 4)
        sites = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        ledger = Ledger()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        outer = SparseLoCo(model, optimizer, sync_every=2, group=sites, ledger=ledger)
        train(model, optimizer, rank // 2, 4)
        return weights(model), outer.last, ledger

    one, two = run_ranks(2, alone), run_ranks(4, sharded)
    for held, outcome, ledger in two:
        assert outcome.accepted == (0, 1)
        for name, x in held.items():
            torch.testing.assert_close(x, one[0][0][name], rtol=1e-4, atol=2e-4)
            assert torch.equal(x, two[0][0][name])
        assert ledger["weights"].exempt_bytes == ledger["weights"].wire_bytes > 0
    assert two[0][2]["outer"].calls == 2
    assert two[1][2]["outer"].calls == 0


def test_a_replica_of_two_ranks_and_one_of_one():
    """Field case H1: a worker couldn't hold an inner group."""

    def work(rank):
        world = init_device_mesh("cpu", (3,))
        inner = [dist.new_group([0, 1]), dist.new_group([2])]
        sites = dist.new_group([0, 2])
        model = net()
        if rank < 2:
            from torch.distributed.device_mesh import DeviceMesh

            mesh = DeviceMesh.from_group(inner[0], "cpu")
            for module in (model.up, model.down, model):
                fully_shard(module, mesh=mesh)
        optimizer = adam(model)
        outer = SparseLoCo(
            model, optimizer, sync_every=3, group=sites if rank != 1 else None,
            inner_group=inner[0] if rank < 2 else None,
        )  # fmt: skip
        losses = train(model, optimizer, rank // 2, 12)
        assert world is not None
        return losses, weights(model), outer

    results = run_ranks(3, work)
    for losses, held, outer in results:
        assert losses[-1] < losses[0]
        assert outer.rounds["committed"] == 4
        assert all(torch.equal(x, results[0][1][n]) for n, x in held.items())
    assert results[1][2].core is None


def test_tensor_parallel_replicas():
    def work(rank):
        site = rank // 2
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "tp"))["tp"]
        model = net()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        sites = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
        outer = SparseLoCo(model, optimizer, sync_every=2, group=sites)
        train(model, optimizer, site, 4)
        return weights(model), outer.last

    def alone(rank):
        model = net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        SparseLoCo(model, optimizer, sync_every=2)
        train(model, optimizer, rank, 4)
        return weights(model)

    expected, results = run_ranks(2, alone)[0], run_ranks(4, work)
    for held, outcome in results:
        assert outcome.accepted == (0, 1)
        for name, x in held.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=2e-4)
            assert torch.equal(x, results[0][0][name])


def test_a_replica_on_two_mesh_axes():
    """FSDP2 over tensor parallelism: shards interleave; one replica that sends everything."""

    def work(rank, outer):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = net()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        alone = dist.new_group([0])
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
        if outer:
            SparseLoCo(
                model, optimizer, sync_every=2, group=alone if rank == 0 else None,
                inner_group=dist.group.WORLD, options=Options(k=4096, quant="none"),
            )  # fmt: skip
        train(model, optimizer, 0, 4)
        return weights(model)

    plain = run_ranks(4, lambda r: work(r, outer=False))
    for held in run_ranks(4, lambda r: work(r, outer=True)):
        for name, x in plain[0].items():
            torch.testing.assert_close(held[name], x, rtol=1e-5, atol=1e-6)


def test_two_stages_in_groups_of_their_owners():
    """Replica 0 holds both stages on one rank; replica 1 is a pipeline of two."""

    def work(rank):
        front, back = dist.new_group([0, 1]), dist.new_group([0, 2])
        groups = {0: {0: front, 1: back}, 1: {0: front}, 2: {1: back}}[rank]
        link = GroupTransport(groups, vote_group=dist.group.WORLD)
        assert link.replica == min(rank, 1)
        parts = [
            Partition(
                {f"w{stage}": torch.ones(64, 70)}, Options(min_quorum=2), replica=link.replica,
                roster=(0, 1), stage=stage, basis_version=7,
            )
            for stage in groups
        ]  # fmt: skip
        for part in parts:
            link.start(part)
        outcomes = []
        for t in range(3):
            spoil = torch.nan if (t, rank) == (1, 2) else 1.0
            draw = torch.randn(64, 70, generator=torch.Generator().manual_seed(10 * t + rank))
            deltas = [lambda name, d=draw * spoil: 1e-3 * d for _ in parts]
            outcomes.append(run_round(parts, deltas, 1 + rank, link))
        return {p.stage: p.theta[f"w{p.stage}"] for p in parts}, outcomes

    results = run_ranks(3, work)
    for _, outcomes in results:
        assert [o.committed for o in outcomes] == [True, False, True]
        assert outcomes[2].accepted == (0, 1)
    assert torch.equal(results[0][0][0], results[1][0][0])
    assert torch.equal(results[0][0][1], results[2][0][1])
    with pytest.raises(ConfigError, match="vote_group"):
        GroupTransport({0: None})


def test_replicas_with_their_own_layouts_need_their_groups():
    def two_axes(rank):
        model = net()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        fully_shard(model.up, mesh=mesh["a"])
        fully_shard(model, mesh=mesh["b"])
        with pytest.raises(ConfigError, match="inner_group"):
            SparseLoCo(model, adam(model))
        with pytest.raises(ConfigError, match="pass group"):
            SparseLoCo(model, adam(model), inner_group=dist.group.WORLD)

    run_ranks(2, two_axes)


# -- failures ----------------------------------------------------------------------------------


def test_other_settings_are_an_error_on_all():
    """Messages of other lengths once ended one replica in gloo's own abort."""

    def work(rank):
        with pytest.raises(
            ContractError, match=r"run with other settings.*k=" + str((64, 32)[rank])
        ):
            SparseLoCo(net(seed=0), None, options=Options(k=(64, 32)[rank]))

    run_ranks(2, work)


def test_a_quorum_that_no_round_can_meet_is_refused():
    def work(rank):
        with pytest.raises(ConfigError, match="min_quorum 3 can't be met by 2 replicas"):
            SparseLoCo(net(seed=0), None, options=Options(min_quorum=3))

    run_ranks(2, work)


def test_other_initial_weights_are_an_error_on_all():
    def work(rank):
        model = net(seed=rank)
        with pytest.raises(ContractError, match="hold other weights"):
            SparseLoCo(model, adam(model))

    run_ranks(2, work)


def test_a_nan_replica_restarts_from_the_shared_weights_with_empty_moments():
    def work(rank):
        model = net()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2)
        train(model, optimizer, rank, 3)
        if rank == 1:
            with torch.no_grad():
                model.up.weight[0, 0] = torch.nan
        train(model, optimizer, rank, 1, start=3)
        moments = optimizer.state[model.up.weight]["exp_avg"].clone()
        held = weights(model)
        first = outer.last
        train(model, optimizer, rank, 2, start=4)
        return first, moments, held, outer.last, weights(model)

    results = run_ranks(3, work)
    for first, _, held, later, after in results:
        assert first.accepted == (0, 2)
        assert later.accepted == (0, 1, 2)
        for name in held:
            assert torch.equal(held[name], results[0][2][name])
            assert torch.equal(after[name], results[0][4][name])
            assert torch.isfinite(after[name]).all()
    assert not results[1][1].any()
    assert results[0][1].any()


def test_settings_are_checked():
    def work(rank):
        model = net()
        half = torch.optim.SGD(model.up.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"does not step 'embed\.weight'"):
            SparseLoCo(model, half)
        with pytest.raises(ConfigError, match="sync_every"):
            SparseLoCo(model, adam(model), sync_every=0)
        with pytest.raises(ConfigError, match="requires a gradient"):
            SparseLoCo([("x", model.frozen)], None)

    run_ranks(1, work)


def test_rounds_by_hand():
    def work(rank):
        model = net()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=100)
        outer.count(64 if rank else 32)
        train(model, optimizer, rank, 2)
        outcome = outer.end_round()
        assert (outer.steps, outer.tokens) == (0, 0)
        outer.detach()
        train(model, optimizer, rank, 2)
        assert outer.steps == 0
        return outcome

    assert all(o.committed for o in run_ranks(2, work))


def test_checkpoint_tools_that_probe_the_optimizer_do_not_count():
    """DCP makes an optimizer create its state by a step with rate 0 and zero gradients."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def work(rank):
        model = net()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=1)
        get_state_dict(model, optimizer)
        assert outer.steps == 0
        assert outer.last is None
        train(model, optimizer, rank, 1)
        assert outer.last.committed

    run_ranks(2, work)


def test_shared_weights_for_evaluation():
    def work(rank):
        model = shard(net(), 4)
        sites = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2, group=sites)
        train(model, optimizer, rank // 2, 2)
        shared = weights(model)
        train(model, optimizer, rank // 2, 1, start=2)
        local = weights(model)
        with outer.shared_weights():
            inside = weights(model)
        assert all(torch.equal(inside[n], shared[n]) for n in shared)
        assert all(torch.equal(x, local[n]) for n, x in weights(model).items())
        assert not torch.equal(local["up.weight"], shared["up.weight"])

    run_ranks(4, work)


# -- resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_resume_at_any_point_equals_the_uninterrupted_run(stop):
    """Field cases H5 and H6: residuals of every replica come back; so does everything else."""
    saved = {}

    def session(rank, steps, start=0, load=False):
        model = net()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=3)
        if load:
            state = saved[rank]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            outer.load_state_dict(state["outer"])
        losses = train(model, optimizer, rank, steps, start)
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "outer": outer.state_dict(),
        }  # fmt: skip
        return losses, copy.deepcopy(state)

    whole = run_ranks(2, lambda r: session(r, 11))
    cut = run_ranks(2, lambda r: session(r, stop))
    saved.update({r: state for r, (_, state) in enumerate(cut)})
    rest = run_ranks(2, lambda r: session(r, 11 - stop, stop, load=True))
    for (losses, end), (first, _), (second, again) in zip(whole, cut, rest, strict=True):
        assert first + second == losses
        for part in ("theta", "residual"):
            for name, x in end["outer"]["core"][part].items():
                assert torch.equal(x, again["outer"]["core"][part][name])
        for name, x in end["model"].items():
            assert torch.equal(x, again["model"][name])
    e = [state["outer"]["core"]["residual"]["up.weight"] for _, state in rest]
    assert not torch.equal(*e)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (2, 3), (4, 2)])
def test_another_number_of_replicas_conserves_what_is_owed(before, after):
    def first(rank):
        model = net()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2)
        train(model, optimizer, rank, 6)
        return outer.state_dict(), model.state_dict()

    states = run_ranks(before, first)

    def second(rank):
        model = net()
        model.load_state_dict(states[0][1])
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2)
        outer.load_state_dict([s for s, _ in states])
        owed = {n: e.clone() for n, e in outer.partition.residual.items()}
        train(model, optimizer, rank, 2)
        assert outer.last.committed
        assert outer.last.round == 3
        return owed

    owed = run_ranks(after, second)
    for name, e in owed[0].items():
        total = sum(o[name].double() for o in owed)
        expected = sum(s["core"]["residual"][name].double() for s, _ in states)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-8)  # fp32 sums
        assert e.any() or name.endswith("bias")


def test_states_that_do_not_belong_are_refused():
    def work(rank):
        model = net()
        optimizer = adam(model)
        outer = SparseLoCo(model, optimizer, sync_every=2)
        train(model, optimizer, rank, 2)
        good = outer.state_dict()
        other = SparseLoCo(net(), None, sync_every=2, options=Options(k=32))
        with pytest.raises(CheckpointError, match="other options"):
            other.load_state_dict(good)
        with pytest.raises(CheckpointError, match="sync_every"):
            SparseLoCo(net(), None, sync_every=3).load_state_dict(good)
        broken = copy.deepcopy(good)
        broken["core"]["theta"]["up.weight"][0, 0] += 1
        with pytest.raises(CheckpointError, match="SHA-256"):
            outer.load_state_dict(broken)
        broken = copy.deepcopy(good)
        broken["core"]["residual"]["up.weight"] = broken["core"]["residual"]["up.weight"].bfloat16()
        with pytest.raises(CheckpointError, match=r"residual of 'up\.weight' must be float32"):
            outer.load_state_dict(broken)
        alone = copy.deepcopy(good)
        alone["core"]["roster"] = [0, 1, 2]
        with pytest.raises(CheckpointError, match="all"):
            outer.load_state_dict(alone)

    run_ranks(2, work)
