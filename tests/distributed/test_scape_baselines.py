"""Baselines against what they reduce to at full density, their simulator, and their bytes."""

import pytest
import torch
from torch import nn

from tests.scape_cases import all_equal, gradient, parameters, train_rank, weights_of
from thinwire.comm import Ledger
from thinwire.errors import CheckpointError, NonFiniteError
from thinwire.scape import Demo, Dgc, PowerSgd, SyncOptimizer, SyncSimulator
from thinwire.testing.ranks import run_ranks
from thinwire.testing.transport import record_transport

RULES = {"dgc": Dgc(0.05), "demo": Demo(), "powersgd": PowerSgd(2)}
SHAPES = [(80, 64), (64, 70), (33,)]


def matrices(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"w{i}", nn.Parameter(torch.randn(s, generator=generator))) for i, s in enumerate(SHAPES)
    ]


def simulated(rule, steps, num_workers, **settings):
    named = matrices()
    sim = SyncSimulator(named, num_workers, rule, lr=0.01, **settings)
    for step in range(steps):
        grads = [
            [gradient(step, rank, i, p) for i, (_, p) in enumerate(named)]
            for rank in range(num_workers)
        ]
        for rank in range(num_workers):
            for (_, p), g in zip(named, grads[rank], strict=True):
                p.grad = g
            sim.collect(rank)
        sim.step()
    return named


@pytest.mark.parametrize("name", RULES)
def test_ranks_equal_the_simulator_and_the_ledger_the_transport(name):
    want = simulated(RULES[name], 6, 3)

    def fn(rank):
        named, ledger = matrices(), Ledger()
        opt = SyncOptimizer(named, RULES[name], lr=0.01, ledger=ledger)
        train_rank(rank, 6, opt, named)
        return weights_of(named), ledger["gradients"]

    with record_transport() as sent:
        results = run_ranks(3, fn)
    for rank, (weights, totals) in enumerate(results):
        assert all_equal(weights, weights_of(want))
        assert totals.wire_bytes == pytest.approx(sent[rank].nbytes, abs=12)
        assert totals.ratio > 2


def dense_twin(make, steps=5):
    named = matrices()
    opt = make([p for _, p in named])
    for step in range(steps):
        for i, (_, p) in enumerate(named):
            p.grad = torch.stack([gradient(step, rank, i, p) for rank in range(2)]).mean(0)
        opt.step()
    return weights_of(named)


def close(a, b, atol):
    return all(torch.allclose(x, y, atol=atol) for x, y in zip(a, b, strict=True))


def test_powersgd_of_full_rank_is_adamw():
    want = dense_twin(lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(0.9, 0.95), weight_decay=0))
    got = simulated(PowerSgd(64), 5, 2)
    assert close(weights_of(got), want, 2e-3)  # AdamW's first steps are signs of noisy zeros


def test_dgc_at_full_density_is_plain_sgd_on_matrices():
    """Momentum factor masking zeroes the velocity wherever it is sent: everywhere."""
    want = dense_twin(lambda ps: torch.optim.SGD(ps, lr=0.01))
    got = simulated(Dgc(1.0), 5, 2)
    assert close(weights_of(got)[:2], want[:2], 1e-6)


def test_dgc_density_ramp():
    dgc = Dgc(0.001, ramp_steps=10)
    assert [dgc.density_at(s) for s in (1, 10, 11, 21, 31, 41)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.004, 0.001,
    ]  # fmt: skip


def test_demo_with_all_components_is_sign_descent():
    class Sign(torch.optim.SGD):
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.grad = p.grad.sign()
            super().step()

    want = dense_twin(lambda ps: Sign(ps, lr=0.01))
    got = simulated(Demo(k=64), 5, 2)
    same = [(a - b).abs() < 1e-5 for a, b in zip(weights_of(got), want, strict=True)]
    assert torch.cat([s.view(-1) for s in same]).float().mean() > 0.999


def test_nan_raises_on_all_and_state_resumes():
    def fn(rank):
        named = parameters((70 * 70,))
        opt = SyncOptimizer(named, Dgc(0.05), lr=0.01)
        train_rank(rank, 3, opt, named)
        part = {k: v for k, v in opt.local_state().items() if k != "state"}
        states = opt.local_state()["state"].items()
        part["state"] = {n: {k: x.clone() for k, x in s.items()} for n, s in states}
        held = weights_of(named)
        train_rank(rank, 2, opt, named, start=3)
        again = parameters((70 * 70,))
        other = SyncOptimizer(again, Dgc(0.05), lr=0.01)
        other.load_local_state([part])
        with torch.no_grad():
            again[0][1].copy_(held[0])
        train_rank(rank, 2, other, again, start=3)
        same = all_equal(weights_of(named), weights_of(again))
        with pytest.raises(CheckpointError, match="resumes on that number"):
            other.load_local_state([part | {"num_ranks": 7}])
        named[0][1].grad = torch.full_like(named[0][1], float("nan") if rank else 1.0)
        with pytest.raises(NonFiniteError):
            opt.step()
        return same

    assert all(run_ranks(2, fn))
