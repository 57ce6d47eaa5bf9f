"""The dense outer loops against plain loops: torch's Nesterov, local SGD's average, int8."""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_sparseloco_ranks import adam, net, shard, train, weights
from thinwire import Ledger
from thinwire.codecs import Blockwise
from thinwire.errors import ConfigError, ContractError, NonFiniteError
from thinwire.sparseloco import DiLoCo
from thinwire.testing.ranks import run_ranks

STEPS, EVERY = 9, 3


def plain(num, alpha, momentum):
    """Replicas one after the other; torch's own SGD moves the shared weights."""
    models = [net() for _ in range(num)]
    optimizers = [adam(m) for m in models]
    shared = [
        p.detach().clone().requires_grad_() for p in models[0].parameters() if p.requires_grad
    ]
    outer = torch.optim.SGD(shared, lr=alpha, momentum=momentum, nesterov=momentum > 0)
    for start in range(0, STEPS, EVERY):
        for r, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, r, EVERY, start)
        local = [[p for p in m.parameters() if p.requires_grad] for m in models]
        for i, theta in enumerate(shared):
            theta.grad = sum(theta.detach() - own[i].detach() for own in local) / num
        outer.step()
        with torch.no_grad():
            for own in local:
                for p, theta in zip(own, shared, strict=True):
                    p.copy_(theta)
    return weights(models[0])


@pytest.mark.parametrize(("alpha", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.5, 0.0)])
def test_equals_torchs_nesterov(alpha, momentum):
    def work(rank):
        model, ledger = net(), Ledger()
        optimizer = adam(model)
        DiLoCo(model, optimizer, sync_every=EVERY, alpha=alpha, momentum=momentum, ledger=ledger)
        train(model, optimizer, rank, STEPS)
        return weights(model), ledger

    expected = plain(2, alpha, momentum)
    results = run_ranks(2, work)
    numel = sum(x.numel() for n, x in expected.items() if n != "frozen")
    for held, ledger in results:
        for name, x in expected.items():
            torch.testing.assert_close(held[name], x, rtol=1e-4, atol=1e-5)
            assert torch.equal(held[name], results[0][0][name])
        assert ledger["outer"].wire_bytes == ledger["outer"].dense_bytes == 3 * 4 * numel


def test_int8_messages_stay_close_and_save_bytes():
    def work(rank, codec):
        model, ledger = net(), Ledger()
        optimizer = adam(model)
        DiLoCo(model, optimizer, sync_every=EVERY, codec=codec, ledger=ledger)
        train(model, optimizer, rank, EVERY)
        return weights(model), ledger

    int8 = run_ranks(2, lambda r: work(r, Blockwise(bits=8, block_size=128)))
    fp32 = run_ranks(2, lambda r: work(r, None))
    # Adam moves a weight by 3e-3 per step at most: a range of 18e-3 in 255 steps, rounded twice.
    bound = 0.7 * 1.9 * 2 * 0.5 * 2 * EVERY * 3.2e-3 / 255
    for name, x in fp32[0][0].items():
        assert torch.equal(int8[0][0][name], int8[1][0][name])
        torch.testing.assert_close(int8[0][0][name], x, rtol=0, atol=bound)
    assert int8[0][1]["outer"].ratio > 3.5
    assert "outer" in int8[0][1].check()


def test_resume_equals_the_uninterrupted_run():
    saved = {}

    def session(rank, steps, start=0):
        model = net()
        optimizer = adam(model)
        outer = DiLoCo(model, optimizer, sync_every=EVERY)
        if start:
            model.load_state_dict(saved[rank][0])
            optimizer.load_state_dict(saved[rank][1])
            outer.load_state_dict(saved[rank][2])
        losses = train(model, optimizer, rank, steps, start)
        parts = model.state_dict(), optimizer.state_dict(), outer.state_dict()
        return losses, copy.deepcopy(parts)

    whole = run_ranks(2, lambda r: session(r, 11))
    cut = run_ranks(2, lambda r: session(r, 5))
    saved.update({r: parts for r, (_, parts) in enumerate(cut)})
    rest = run_ranks(2, lambda r: session(r, 6, 5))
    for (losses, _), (first, _), (second, _) in zip(whole, cut, rest, strict=True):
        assert first + second == losses


def test_fsdp_replicas():
    def work(rank):
        model = shard(net(), 4)
        sites = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        outer = DiLoCo(model, optimizer, sync_every=2, group=sites)
        train(model, optimizer, rank // 2, 4)
        return weights(model), outer.last

    results = run_ranks(4, work)
    for held, outcome in results:
        assert outcome.accepted == (0, 1)
        assert all(torch.equal(x, results[0][0][n]) for n, x in held.items())


def test_faults_are_raised_by_all():
    def work(rank):
        with pytest.raises(ContractError, match="other weights"):
            DiLoCo(net(seed=rank), None)
        model = net()
        with pytest.raises(ConfigError, match="momentum"):
            DiLoCo(model, None, momentum=1.0)
        outer = DiLoCo(model, None, sync_every=1)
        if rank == 1:
            with torch.no_grad():
                model.up.weight[0, 0] = torch.inf
        with pytest.raises(NonFiniteError, match=r"'up\.weight'"):
            outer.end_round()
        assert all(torch.isfinite(x).all() for x in outer.core.theta.values())

    run_ranks(2, work)


@pytest.mark.parametrize("codec", [None, Blockwise(bits=8, block_size=128)])
def test_nan_is_raised_by_all_ranks_of_all_replicas(codec):
    """The leader raises before it has gathered every parameter; its other rank must not hang."""

    def work(rank):
        model = shard(net(), 4)
        sites = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        outer = DiLoCo(model, None, sync_every=1, codec=codec, group=sites)
        if rank == 3:
            with torch.no_grad():
                model.embed.weight.to_local()[0, 0] = torch.nan
        with pytest.raises(NonFiniteError):
            outer.end_round()
        with torch.no_grad():
            model.embed.weight.to_local().nan_to_num_()
        return outer.end_round().committed

    assert run_ranks(4, work) == [True] * 4
