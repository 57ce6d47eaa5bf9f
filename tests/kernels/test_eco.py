"""ECO's kernels equal their reference; the identities and numbers of the method."""

import itertools

import pytest
import torch

from tests.kernels.cases import same
from thinwire.kernels import eco
from thinwire.kernels.eco import reference
from thinwire.kernels.random import RandomKey, tensor_id
from thinwire.kernels.random import reference as random_reference

KEY = RandomKey(run_key=2**63 + 11, tensor=tensor_id("w"), step=5, offset=3)
FORMATS = ("fp8_e4m3", "int8", "int4")


def uniforms(rows, columns):
    key, tensor, step, offset = KEY.words
    index = torch.arange(rows * columns) + offset
    return random_reference.uniform(index, key, tensor, step).view(rows, columns)


def weights(rows, columns):
    g = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=g)
    if rows > 2:
        x[1] = 0.0
        x[2] = 0.7
    return x


CASES = list(itertools.product(FORMATS, (0, -1, 32), (False, True), (False, True)))
SHAPES = [(1, 1), (3, 31), (5, 257), (64, 2049)]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_equals_reference(shape):
    x, u = weights(*shape), uniforms(*shape)
    for fmt, group, pow2, sr in CASES:
        q = eco.Quantizer(fmt, group, pow2)
        codes, scales = eco.quantize(x, q, KEY if sr else None)
        expected = reference.quantize(x, q, u if sr else None)
        assert torch.equal(scales, expected[1]), (q, sr)
        assert torch.equal(codes, expected[0]), (q, sr)
        for dtype in (torch.float32, torch.bfloat16):
            values = eco.dequantize(codes, scales, shape[1], q, dtype)
            assert torch.equal(values, reference.dequantize(codes, scales, shape[1], q).to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adam", [True, False])
def test_step_equals_reference(shape, adam):
    x, u = weights(*shape), uniforms(*shape)
    g = weights(*shape) * 0.1
    if shape[0] > 3:
        g[3, 7] = float("nan")
    h = eco.Step(0.01, 0.9, 0.98, 1e-9, 0.1, 0.02, 0.1, -1.2, adam)
    for fmt, group, pow2, sr in CASES:
        for g_dtype, state in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
            q = eco.Quantizer(fmt, group, pow2)
            start = reference.quantize(x, q, None)
            m = (x.flip(0) * 0.01).to(state)
            v = m.float().square().to(state) if adam else None
            grad = g.to(g_dtype)
            a = [t.clone() if t is not None else None for t in (*start, m, v)]
            b = [t.clone() if t is not None else None for t in (*start, m, v)]
            bad = eco.step_(a[0], a[1], grad, a[2], a[3], q, h, KEY if sr else None)
            expected = reference.step(b[0], b[1], grad, b[2], b[3], q, h, u if sr else None)
            assert bad == expected, (q, sr)
            for got, want in zip(a, b, strict=True):
                assert got is None or same(got, want), (q, sr, g_dtype)


def test_magnitudes_given_are_used():
    x = weights(5, 257)
    q = eco.Quantizer("int4", -1)
    h = eco.Step(0.01, 0.9, 0.98, 1e-9, 0.1, 0.02, 0.0, -1.2)
    codes, scales = eco.quantize(x, q)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    top = eco.step_absmax(codes, scales, x, m, v, q, h)
    assert torch.equal(top, reference.step_absmax(codes, scales, x, m, v, q, h))
    assert eco.step_(codes, scales, x, m, v, q, h, magnitude=top * 2) == 0
    assert torch.equal(scales, top * 2 / 7)


def test_golden_row():
    row = torch.tensor([[1, 0.5, 0.3, -0.07, 0.001, 0, -1, 0.9]])
    codes, scales = eco.quantize(row, eco.Quantizer("fp8_e4m3"))
    assert scales.item() == pytest.approx(0.00223214296, rel=1e-7)
    assert codes.tolist() == [[0x7E, 0x76, 0x70, 0xE0, 0x2E, 0x00, 0xFE, 0x7D]]
    values = [1, 0.5, 0.285714, -0.0714286, 0.000976563, 0, -1, 0.928571]
    assert eco.dequantize(codes, scales, 8, eco.Quantizer("fp8_e4m3"))[0].tolist() == pytest.approx(
        values, rel=1e-5
    )


def test_one_step_by_hand():
    h = reference.Step(1e-3, 0.9, 0.98, 0.0, 0.1, 0.02, 0.0, (0.1 / 1e-3) * (1 - 1 / 0.9))
    f = lambda x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    theta, m, _, den = reference.adam_update(f(0.5), f(0.0), f(0.0), f(0.1), h)
    assert theta.item() == pytest.approx(0.499)
    assert m.item() == pytest.approx(0.01)
    assert reference.inject(m, theta - 0.5, den, h).item() == pytest.approx(0.0111111, rel=1e-5)


def test_stochastic_fp8_is_unbiased_in_every_binade():
    n = 100_000
    u = random_reference.uniform(torch.arange(n), 1, 2, 3)
    for exponent in range(-10, 9):
        for fraction in (1.01, 1.21, 1.47, 1.74):
            y = min(fraction * 2.0**exponent, 447.0)
            q = reference.round_to_grid(torch.full((n,), y), "fp8_e4m3", u).double()
            error = (q.mean() - torch.tensor(y).double()).abs()
            assert error <= 5 * q.std() / n**0.5 + 1e-12, y
            assert torch.equal(q.float().to(torch.float8_e4m3fn).double(), q)


def test_philox_known_answer_and_cpu_stream():
    zero = torch.zeros(1, dtype=torch.int64)
    words = random_reference.philox((zero, zero, zero, zero), 0)[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_stochastic_bf16_equals_reference():
    x = torch.randn(1003)
    x[5] = float("inf")
    key, tensor, step, offset = KEY.words
    index = torch.arange(1003) + offset
    block = index >> 2
    full = torch.full_like(index, step)
    words = random_reference.philox((block, block * 0, full, torch.full_like(index, tensor)), key)
    word = words.gather(1, (index & 3)[:, None])[:, 0]
    assert torch.equal(eco.stochastic_bf16(x, KEY), reference.stochastic_bf16(x, word))


@pytest.mark.parametrize("sr", [False, True])
def test_virtual_sequence_identity(sr):
    """Rounding never leaks out of the virtual weights, for any error (fp64, grid 0.05)."""
    gen = torch.Generator().manual_seed(0)
    theta = torch.randn(64, generator=gen, dtype=torch.float64)
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    worst = 0.0
    for t in range(1, 301):
        lr = 0.05 * (0.1 + t / 300)
        b1, b2, wd = 0.9, 0.98, 0.1
        c1, c2 = 1 - b1**t, 1 - b2**t
        h = reference.Step(lr, b1, b2, 1e-9, c1, c2, wd, (c1 / lr) * (1 - 1 / b1))
        g = torch.randn(64, generator=gen, dtype=torch.float64) + theta
        new, m1, v, den = reference.adam_update(theta, m, v, g, h)
        u = torch.rand(64, generator=gen, dtype=torch.float64)
        q = (torch.floor(new / 0.05 + u) if sr else torch.round(new / 0.05)) * 0.05
        m1 = reference.inject(m1, new - q, den, h)
        p = lr / (c1 * den)
        left = q - (p * b1 / (1 - b1)) * m1
        right = theta - (p * b1 / (1 - b1)) * m - p * g - lr * wd * theta
        worst = max(worst, (left - right).abs().max().item())
        theta, m = q, m1
    assert worst <= 1e-12
