"""AdamS against its definition in plain Python, its step bound, and torch's manners."""

import copy
import math

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.scape import AdamS
from thinwire.scape.rules import step_bound


def plain(w, grads, lr, b1, b2, eps, wd):
    """Update one number in Python floats."""
    m = 0.0
    for g in grads:
        v = b2 * m * m + (1 - b2) * g * g
        m = b1 * m + (1 - b1) * g
        w = (1 - lr * wd) * w - lr * m / (math.sqrt(v) + eps)
    return w, m


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.9)])
def test_equals_its_definition(foreach, betas):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    grads = torch.randn(20, 3, 2, generator=generator, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    bias = nn.Parameter(start[0].clone())
    opt = AdamS([p, bias], lr=0.01, betas=betas, weight_decay=0.1, foreach=foreach)
    for g in grads:
        p.grad, bias.grad = g.clone(), g[0].clone()
        opt.step()
    for i in range(3):
        for j in range(2):
            w, m = plain(start[i, j].item(), grads[:, i, j].tolist(), 0.01, *betas, 1e-8, 0.1)
            assert p[i, j].item() == pytest.approx(w, rel=1e-12)
            assert opt.state[p]["exp_avg"][i, j].item() == pytest.approx(m, rel=1e-12)
    w, _ = plain(start[0, 0].item(), grads[:, 0, 0].tolist(), 0.01, *betas, 1e-8, 0.0)
    assert bias[0].item() == pytest.approx(w, rel=1e-12)  # one dimension: no decay


BOUNDS = [
    ((0.9, 0.95), 1.025978, 0.447214, 0.923381),
    ((0.9, 0.999), 3.287980, 3.162278, 0.900450),
]


@pytest.mark.parametrize(("betas", "bound", "first", "idle"), BOUNDS)
def test_step_bounds(betas, bound, first, idle):
    assert step_bound(*betas) == pytest.approx(bound, abs=1e-6)
    p = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.warns(UserWarning, match="3.29") if bound > 2 else torch.no_grad():
        opt = AdamS([p], lr=1.0, betas=betas, eps=1e-16, weight_decay=0)
    p.grad = torch.full_like(p, -3e-3)
    opt.step()
    assert torch.allclose(p.detach(), torch.full_like(p, first), atol=1e-6)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.allclose(p.detach() - before, torch.full_like(p, idle), atol=1e-6)


@pytest.mark.parametrize(("first", "travel"), [(1e-1, 121.8), (1e-3, 81.4), (1e-5, 41.1)])
def test_idle_elements_walk_until_the_moment_nears_eps(first, travel):
    p = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    opt = AdamS([p], lr=1.0, weight_decay=0)
    p.grad = torch.full_like(p, first)
    opt.step()
    p.grad = torch.zeros_like(p)
    for _ in range(1000):
        opt.step()
    assert -p.item() == pytest.approx(travel, abs=0.1)


def test_parameters_without_gradient_stay():
    p, q = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    opt = AdamS([p, q], lr=0.1)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(q.detach(), torch.ones(2, 2))
    assert opt.state[q]["step"] == 0
    assert opt.state[p]["step"] == 1


def test_state_resumes():
    def make():
        p = nn.Parameter(torch.ones(3, 3))
        return p, AdamS([p], lr=0.1)

    def steps(p, opt, count):
        for i in range(count):
            p.grad = torch.full_like(p, math.sin(i + opt.state[p]["step"].item()))
            opt.step()

    p, opt = make()
    steps(p, opt, 3)
    q, other = make()
    with torch.no_grad():
        q.copy_(p)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps(p, opt, 3)
    steps(q, other, 3)
    assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "lr"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_settings_that_cannot_work(settings, text):
    with pytest.raises(ConfigError, match=text):
        AdamS([nn.Parameter(torch.ones(2))], **settings)
