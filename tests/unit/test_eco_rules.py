"""ECO's update rules against closed forms: identities in fp64, floors, drift."""

import math

import pytest
import torch

from tests.eco_models import quantized
from thinwire.eco import EcoAdamW, EcoSGD
from thinwire.eco.formats import Format
from thinwire.eco.rounding import decode, encode
from thinwire.eco.sgd import exact_inject
from thinwire.kernels.eco import Step, reference
from thinwire.kernels.random import RandomKey

GRID = 0.05


def round_rtn(x):
    return (x / GRID).round() * GRID


def round_sr(x):
    return (x / GRID + torch.rand_like(x)).floor() * GRID


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("q", [round_rtn, round_sr])
def test_sgd_virtual_sequence_never_sees_the_rounding(q):
    """z = w^ - lr beta/(1 - beta) m obeys z' = z - lr (g + decay w^) for any error."""
    lr, beta, decay = 0.05, 0.9, 0.1
    h = Step(lr=lr, b1=beta, weight_decay=decay, inject=(1 - 1 / beta) / lr, adam=False)
    w, m = round_rtn(torch.randn(64, dtype=torch.float64)), torch.zeros(64, dtype=torch.float64)
    worst = 0.0
    for _ in range(300):
        g = w + 0.1 * torch.randn_like(w)
        target, new_m = reference.sgd_update(w, m, g, h)
        new_w = q(target)
        new_m = reference.inject(new_m, target - new_w, 1.0, h)
        z, want = new_w - lr * beta / (1 - beta) * new_m, w - lr * beta / (1 - beta) * m
        want = want - lr * (g + decay * w)
        worst = max(worst, (z - want).abs().max().item())
        w, m = new_w, new_m
    assert worst <= 1e-12


@pytest.mark.parametrize("q", [round_rtn, round_sr])
def test_adam_virtual_sequence_with_schedule_and_decay(q):
    b1, b2, decay = 0.9, 0.98, 0.1
    w = round_rtn(torch.randn(64, dtype=torch.float64))
    m, v, worst = torch.zeros_like(w), torch.zeros_like(w), 0.0
    for t in range(1, 301):
        lr = 1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 300)))
        c1 = 1 - b1**t
        h = Step(lr, b1, b2, 1e-9, c1, 1 - b2**t, decay, c1 / lr * (1 - 1 / b1))
        g = w + 0.1 * torch.randn_like(w)
        target, new_m, new_v, den = reference.adam_update(w, m, v, g, h)
        new_w = q(target)
        new_m = reference.inject(new_m, target - new_w, den, h)
        p = lr / (c1 * den)
        k = p * b1 / (1 - b1)
        worst = max(worst, (new_w - k * new_m - (w - k * m - p * g - lr * decay * w)).abs().max())
        w, m, v = new_w, new_m, new_v
    assert worst <= 1e-12


def schedule(kind, t, steps=400, lr=0.05):
    if kind == "constant":
        return lr
    warm = steps // 10
    if t < warm:
        return lr * (0.01 + 0.99 * t / warm)
    s = (t - warm) / (steps - warm)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * s)))


def trajectory(rule, kind, decay, steps=400, beta=0.9):
    """Return max |w^ - w^_master| over a 64-d quadratic; grid 0.05, to nearest."""
    generator = torch.Generator().manual_seed(1)
    curvature = torch.linspace(0.2, 1.0, 64, dtype=torch.float64)
    start = torch.randn(64, dtype=torch.float64, generator=generator)
    master, mm = start.clone(), torch.zeros(64, dtype=torch.float64)
    w, error = round_rtn(start), start - round_rtn(start)
    lr0 = schedule(kind, 0)
    m = -(1 - lr0 * decay) * error / (beta * lr0) if rule == "exact" else torch.zeros_like(mm)
    worst = 0.0
    for t in range(steps):
        lr, later = schedule(kind, t), schedule(kind, t + 1)
        h = Step(lr=lr, b1=beta, weight_decay=decay, adam=False,
                 inject=-(1 - later * decay) / (beta * later))  # fmt: skip
        master, mm = reference.sgd_update(master, mm, curvature * round_rtn(master), h)
        target, m = reference.sgd_update(w, m, curvature * w, h)
        w = round_rtn(target)
        if rule == "exact":
            m = exact_inject(m, error, target - w, h)
        elif rule == "eco":
            m = m + (1 / lr) * (1 - 1 / beta) * (target - w)
        error = target - w
        worst = max(worst, (w - round_rtn(master)).abs().max().item())
    return worst


@pytest.mark.parametrize("kind", ["constant", "warm"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_exact_rule_follows_master_weights(kind, decay):
    assert trajectory("exact", kind, decay) == 0.0


def test_memory_free_rule_stays_near_and_naive_does_not():
    eco, naive = trajectory("eco", "constant", 0), trajectory("naive", "constant", 0)
    assert 0 < eco < 1.0 < naive


def test_one_step_by_hand():
    h = Step(1e-3, 0.9, 0.98, 0.0, 0.1, 0.02, 0.0, 0.1 / 1e-3 * (1 - 1 / 0.9))
    one = torch.ones(1, dtype=torch.float64)
    target, m, _, den = reference.adam_update(0.5 * one, 0 * one, 0 * one, 0.1 * one, h)
    assert target.item() == pytest.approx(0.499, abs=1e-12)
    assert m.item() == pytest.approx(0.01, abs=1e-15)
    assert reference.inject(m, target - 0.5, den, h).item() == pytest.approx(0.0111111, abs=1e-7)


def test_fp8_row_by_hand():
    x = torch.tensor([[1, 0.5, 0.3, -0.07, 0.001, 0, -1, 0.9]])
    form = Format.parse("fp8_e4m3")
    codes, scales = encode(x, form, form.blocks((1, 8), 1))
    assert scales.item() == pytest.approx(0.00223214296, rel=1e-7)
    assert codes[0].tolist() == [0x7E, 0x76, 0x70, 0xE0, 0x2E, 0x00, 0xFE, 0x7D]
    want = [1, 0.5, 0.285714, -0.0714286, 0.000976563, 0, -1, 0.928571]
    values = decode(codes, scales, form, form.blocks((1, 8), 1))
    assert values[0].tolist() == pytest.approx(want, abs=1e-6)


def test_fp8_stochastic_rounding_is_unbiased_in_every_binade():
    """Field case E1; 4 values in each binade from 2^-10 to 2^8, 20,000 roundings of each."""
    values = torch.tensor([2.0**k * f for k in range(-10, 9) for f in (1.0, 1.17, 1.43, 1.81)])
    values = values[values <= 448]
    rows = torch.cat([values, torch.tensor([448.0])]).repeat(20_000, 1)  # 448 sets the scale to 1
    form = Format.parse("fp8_e4m3")
    blocks = form.blocks(tuple(rows.shape), 1)
    codes, scales = encode(rows, form, blocks, RandomKey(run_key=3))
    decoded = decode(codes, scales, form, blocks).double()[:, :-1]
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.isin(decoded, grid).all()
    spread = decoded.std(0) / math.sqrt(len(rows))
    errors = (decoded.mean(0) - values.double()).abs()
    assert (errors <= 5 * spread + 1e-12).all()


# beta, lr -> E[grad^2] / sigma^2 of master weights, naive, ECO; L = 1.
FLOORS = {
    (0.9, 0.1): (1.0501, 9.763, 5.2770),
    (0.9, 0.01): (1.0050, 54.751, 5.2645),
    (0.9, 0.001): (1.0005, 504.750, 5.2633),
    (0.95, 0.1): (1.0501, 14.763, 10.2696),
    (0.95, 0.01): (1.0050, 59.751, 10.2577),
    (0.95, 0.001): (1.0005, 509.750, 10.2565),
}


def stationary(step):
    """Return the covariance of (w, m) under x' = step(x, noise), from the map's own columns."""
    unit = torch.eye(3, dtype=torch.float64)
    columns = [torch.stack(step(*row)) for row in unit]
    a, b = torch.stack(columns[:2], 1), columns[2]
    eye = torch.eye(4, dtype=torch.float64)
    solved = torch.linalg.solve(eye - torch.kron(a, a), torch.outer(b, b).flatten())
    return solved.view(2, 2)


@pytest.mark.parametrize(("beta", "lr"), FLOORS)
def test_noise_floors(beta, lr):
    h = Step(lr=lr, b1=beta, inject=(1 - 1 / beta) / lr, adam=False)

    def rounded(w, m, noise, factor):
        target, m = reference.sgd_update(w, m, w, h)
        return target - noise, m + factor * noise

    def master(w, m, noise):
        return reference.sgd_update(w, m, w - noise, h)

    got = (
        stationary(master)[0, 0].item() + 1,
        stationary(lambda *x: rounded(*x, 0.0))[0, 0].item(),
        stationary(lambda *x: rounded(*x, h.inject))[0, 0].item(),
    )
    assert got == pytest.approx(FLOORS[beta, lr], rel=1e-4)


# arm -> FP8 at 100, 1000, 4000 steps with the last's spread, INT4 likewise.
DRIFT = {
    "master-rtn": ((0.240, 0.369, 0.379, 0.004), (0.038, 0.133, 0.300, 0.01)),
    "master-sr": ((0.426, 0.518, 0.530, 0.004), (0.171, 0.302, 0.417, 0.02)),
    "naive-rtn": ((0.331, 1.42, 4.64, 0.4), (0.040, 0.19, 0.64, 0.2)),
    "naive-sr": ((0.820, 2.38, 4.75, 0.01), (0.277, 0.852, 1.84, 0.03)),
    "eco-rtn": ((0.314, 1.03, 2.33, 0.03), (0.038, 0.134, 0.367, 0.008)),
    "eco-sr": ((0.488, 0.603, 0.726, 0.01), (0.195, 0.340, 0.481, 0.01)),
}
STEPS = (100, 1000, 4000)


def drift(arm, fmt, steps, seed):
    """Return RMS(w^ - w_fp32) / gap under gradients that don't depend on the weights."""
    kind, rounding = arm.split("-")
    generator = torch.Generator().manual_seed(seed)
    form = Format.parse(fmt)
    blocks = form.blocks((32, 256), 1)
    start = torch.randn(32, 256, generator=generator) * 0.05
    start = decode(*encode(start, form, blocks), form, blocks)
    gap = start.abs().mean() * 2**-3.5 if fmt == "fp8_e4m3" else start.abs().max() / 7
    model = quantized(start, fmt, master=kind == "master")
    plain = torch.nn.Parameter(start.clone())
    options = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.0}
    optimizer = EcoAdamW(
        model.parameters(), **options, rounding=rounding, eco=kind == "eco", run_key=seed
    )
    twin = torch.optim.AdamW([plain], **options)
    fixed = 0.02 * torch.randn(32, 256, generator=generator).sign()
    for _ in range(steps):
        plain.grad = torch.randn(32, 256, generator=generator) + fixed
        model.weight.grad = plain.grad
        optimizer.step()
        twin.step()
    difference = model.weight.dequantize() - plain.detach()
    return (difference.square().mean().sqrt() / gap).item()


def check_drift(arm, fmt, column):
    row = DRIFT[arm][fmt == "int4"]
    got = sum(drift(arm, fmt, STEPS[column], seed) for seed in range(3)) / 3
    relative_spread = row[3] / row[2]
    assert got == pytest.approx(row[column], rel=4 * relative_spread + 0.05)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int4"])
@pytest.mark.parametrize("arm", DRIFT)
def test_flat_direction_drift(arm, fmt):
    check_drift(arm, fmt, 0)


@pytest.mark.slow
@pytest.mark.parametrize("column", [1, 2])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int4"])
@pytest.mark.parametrize("arm", DRIFT)
def test_long_flat_direction_drift(arm, fmt, column):
    check_drift(arm, fmt, column)


def test_a_master_copy_follows_torch_adamw():
    model = quantized(torch.randn(9, 40), master=True)
    plain = torch.nn.Parameter(model.weight.master.clone())
    ours = EcoAdamW(model.parameters(), lr=1e-2, eco=False)
    theirs = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.1)
    for _ in range(20):
        plain.grad = torch.randn(9, 40)
        model.weight.grad = plain.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(model.weight.master, plain.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("granularity", ["row", "tensor", "group:8"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8", "int4"])
def test_the_fused_step_equals_the_plain_rule(fmt, granularity, monkeypatch):
    weight, gradients = torch.randn(11, 37), [torch.randn(11, 37) for _ in range(4)]
    results = []
    for fused in (True, False):
        model = quantized(weight, fmt, granularity=granularity)
        optimizer = EcoAdamW(model.parameters(), lr=1e-2)
        if not fused:
            monkeypatch.setattr(optimizer, "_fusible", lambda *_: False)
        for g in gradients:
            model.weight.grad = g.clone()
            optimizer.step()
        state = optimizer.state[model.weight]
        moments = (state["exp_avg"], state["exp_avg_sq"])
        results.append((model.weight.codes, model.weight.scales, *moments))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_exact_sgd_is_a_master_run_from_the_rounded_start():
    start = torch.randn(6, 32)
    exact = quantized(start, "int8")
    begin = exact.weight.dequantize()
    master = quantized(begin, "int8", master=True)
    a = EcoSGD(exact.parameters(), lr=0.05, exact=True, rounding="rtn")
    b = EcoSGD(master.parameters(), lr=0.05, eco=False, rounding="rtn")
    for _ in range(50):
        for model, optimizer in ((exact, a), (master, b)):
            model.weight.grad = model.weight.dequantize() * 0.5
            optimizer.step()
    gap = begin.abs().amax(1, keepdim=True) / 127
    assert ((exact.weight.dequantize() - master.weight.dequantize()).abs() <= 1.01 * gap).all()
