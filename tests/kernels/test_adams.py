"""AdamS, SCAPE's sweep and mask selection equal their references; the method's numbers."""

import itertools

import pytest
import torch

from tests.kernels.cases import same, values
from thinwire.kernels import adams
from thinwire.kernels.adams import reference


def state(n, seed=0):
    g = torch.Generator().manual_seed(n + seed)
    theta, m, r, grad = (torch.randn(n, generator=g) for _ in range(4))
    return theta, m * 0.1, grad, r * 0.01


def mask(n, k):
    g = torch.Generator().manual_seed(n)
    return torch.randperm(n, generator=g)[:k].sort().values


@pytest.mark.parametrize("n", [0, 1, 31, 2049, 70_001])
def test_sweep_and_gather_equal_reference(n):
    for density, transfer, clip, dtype in itertools.product(
        (0.0, 0.05, 1.0), (True, False), (1.0, 0.4), (torch.float32, torch.bfloat16)
    ):
        h = adams.Step(0.01, 0.9, 0.95, 1e-8, 0.1, transfer, clip)
        index = mask(n, round(n * density))
        theta, m, grad, r = state(n)
        grad = grad.to(dtype)
        x = adams.gather(m, grad, r, index, 0.9)
        assert torch.equal(x, reference.gather(m, grad, r, index, 0.9))
        mean = x * 0.7
        for owned, kept in itertools.product((True, False), (None, x * 1e-3)):
            a = [theta.clone(), m.clone(), r.clone(), torch.empty(n)]
            b = [t.clone() for t in a]
            adams.sweep_(
                a[0] if owned else None, a[1], grad, a[2], index, mean, kept, h, statistic=a[3]
            )
            reference.sweep(b[0] if owned else None, b[1], grad, b[2], index, mean, kept, h, b[3])
            for got, want in zip(a, b, strict=True):
                assert torch.equal(got, want), (density, h, owned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_step_equals_reference(dtype):
    for n in (0, 1, 2049, 70_001):
        theta, m, grad, _ = state(n)
        grad = grad.to(dtype)
        other = theta.clone(), m.clone()
        h = adams.Step(0.01, weight_decay=0.1)
        adams.adams_(theta, m, grad, h)
        reference.adams(*other, grad, h)
        assert torch.equal(theta, other[0])
        assert torch.equal(m, other[1])


def test_largest_equals_reference():
    for n in (1, 63, 2049, 100_003):
        for name, x in values(n).items():
            if name in ("nan", "inf"):
                continue
            x = x.abs()
            for k in {0, 1, n // 100, n // 2, n}:
                assert torch.equal(adams.largest(x, k), reference.largest(x, k)), (n, name, k)
    assert adams.largest(torch.tensor([1.0, 2, 2, 2, 0]), 2).tolist() == [1, 2]
    assert adams.largest(torch.zeros(5), 2).tolist() == [0, 1]


def test_full_mask_is_dense_adams_in_fp64():
    n, world = 2000, 8
    g = torch.Generator().manual_seed(0)
    target = torch.randn(n, generator=g, dtype=torch.float64)
    for transfer in (True, False):
        h = reference.Step(0.01, transfer=transfer)
        a = torch.zeros(n, dtype=torch.float64)
        b, m_a, m_b = a.clone(), a.clone(), a.clone()
        r = torch.zeros(world, n, dtype=torch.float64)
        index = torch.arange(n)
        worst = 0.0
        for _ in range(100):
            noise = torch.randn(world, n, generator=g, dtype=torch.float64)
            grads = (a - target) + noise
            x = torch.stack(
                [reference.gather(m_a, grads[i], r[i], index, h.b1) for i in range(world)]
            )
            p = x.sum(0) / world
            before = m_a.clone()
            for i in range(world):
                m = before.clone()
                reference.sweep(a if i == 0 else None, m, grads[i], r[i], index, p, None, h)
                m_a = m
            reference.adams(b, m_b, (b - target) + noise.mean(0), h)
            worst = max(worst, (a - b).abs().max().item())
        assert worst <= 1e-12


@pytest.mark.parametrize("transfer", [True, False])
def test_conservation_and_bound_in_fp64(transfer):
    n, world = 500, 4
    gen = torch.Generator().manual_seed(1)
    h = reference.Step(1.0, transfer=transfer)
    m = torch.zeros(n, dtype=torch.float64)
    r = torch.zeros(world, n, dtype=torch.float64)
    worst = step = 0.0
    for _ in range(300):
        g = torch.randn(world, n, generator=gen, dtype=torch.float64)
        index = torch.randperm(n, generator=gen)[:50].sort().values
        before = h.b1 * m + (1 - h.b1) * g.mean(0) + r.mean(0)
        p = torch.stack([reference.gather(m, g[i], r[i], index, h.b1) for i in range(world)]).mean(
            0
        )
        theta = torch.zeros(n, dtype=torch.float64)
        new = m
        for i in range(world):
            new = m.clone()
            reference.sweep(theta if i == 0 else None, new, g[i], r[i], index, p, None, h)
        m = new
        worst = max(worst, (m + r.mean(0) - before).abs().max().item())
        step = max(step, theta.abs().max().item())
    assert worst <= 1e-12
    assert step <= 1.025978352


def test_first_and_idle_steps():
    theta, m = torch.zeros(3), torch.zeros(3)
    adams.adams_(theta, m, torch.tensor([1e-3, 1.0, -5.0]), adams.Step(1.0, eps=1e-30))
    assert theta.tolist() == pytest.approx([-0.4472136, -0.4472136, 0.4472136], rel=1e-6)
    theta, m = torch.zeros(1), torch.ones(1)
    adams.adams_(theta, m, torch.zeros(1), adams.Step(1.0, eps=1e-30))
    assert theta.item() == pytest.approx(-0.9233805, rel=1e-6)


def test_statistic_of_nan_is_selected():
    x = torch.tensor([1.0, float("nan"), 3.0])
    assert adams.largest(x, 1).tolist() == [1]


def test_sweep_leaves_unseen_rows_alone():
    n = 100
    theta = torch.randn(n)
    before = theta.clone()
    m, r, g = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    index = torch.arange(0, n, 3)
    adams.sweep_(theta, m, g, r, index, torch.zeros(index.numel()), None, adams.Step(0.1))
    assert same(theta, before)
