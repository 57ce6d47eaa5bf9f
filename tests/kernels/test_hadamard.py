"""The hadamard CPU kernels equal their reference; the published golden groups and errors."""

import itertools

import pytest
import torch

from tests.kernels.cases import same, values
from thinwire.codecs import Hadamard
from thinwire.kernels.hadamard import reference

FORMATS = ("e4m3", "e5m2", "int8", "int4")
ARMS = [
    {"hadamard": had, "alpha": alpha, "merge_scales": merge, "nonfinite": policy}
    for had, alpha, merge, policy in itertools.product(
        (True, False), (True, False), (True, False), ("raise", "zero")
    )
]


def decode_reference(codec: Hadamard, wires: torch.Tensor, n: int, dtype: torch.dtype):
    out = torch.empty(wires.shape[0], n, dtype=dtype)
    reference.decode(wires, out, codec.num_groups(n), codec.layout)
    return out


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_reference(fmt, dtype):
    for arm, (group, n) in itertools.product(ARMS, ((32, 31), (128, 1000), (512, 0))):
        codec = Hadamard(fmt=fmt, group=group, **arm)
        for name, x in values(n, dtype).items():
            wire = reference.encode(x, codec.num_groups(n), codec.layout)
            assert torch.equal(codec.encode(x), wire), (codec, name)
            expected = decode_reference(codec, wire[None], n, dtype)[0]
            assert same(codec.decode(wire, n, dtype), expected), (codec, name)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("middle", ["fp32", "cast", "rotated"])
def test_sum_and_middle_equal_reference(fmt, middle):
    for arm, dtype in itertools.product(ARMS[::2], (torch.float32, torch.bfloat16)):
        codec = Hadamard(fmt=fmt, group=64, middle=middle, **arm)
        x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(5)).to(dtype)
        wires = torch.stack([codec.encode(row) for row in x])
        rows = decode_reference(codec, wires, 1000, torch.float32)
        total = (rows[0] + rows[1]) + rows[2]
        assert same(codec.decode_sum(wires, 1000, dtype), total)
        strided = torch.zeros(3, wires.shape[1] + 12, dtype=torch.uint8)[:, 4:-8].copy_(wires)
        assert same(codec.decode_sum(strided, 1000, dtype), total)
        expected = reference.decode_sum_encode(
            wires, codec.num_groups(1000), codec.layout, middle, dtype
        )
        assert torch.equal(codec.decode_sum_encode(wires, 1000, dtype), expected)


def test_random_bytes_decode_as_the_reference_does():
    g = torch.Generator().manual_seed(1)
    for fmt, arm in itertools.product(FORMATS, ARMS):
        codec = Hadamard(fmt=fmt, group=32, **arm)
        size = (2, codec.wire_nbytes(1000, torch.float32))
        wires = torch.randint(0, 256, size, dtype=torch.uint8, generator=g)
        got = codec.decode(wires, 1000, torch.float32)
        assert same(got, decode_reference(codec, wires, 1000, torch.float32)), codec


@pytest.mark.parametrize(
    ("fmt", "group", "hadamard", "expected"),
    [
        ("e4m3", 32, True, 5.8e-4),
        ("e4m3", 64, True, 6.3e-4),
        ("e4m3", 128, True, 6.6e-4),
        ("e4m3", 256, True, 6.8e-4),
        ("e4m3", 512, True, 6.9e-4),
        ("e5m2", 128, True, 2.6e-3),
        ("int8", 128, True, 4.2e-5),
        ("int8", 128, False, 4.2e-5),
    ],
)
def test_squared_error_on_gaussian_data(fmt, group, hadamard, expected):
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    codec = Hadamard(fmt=fmt, group=group, hadamard=hadamard)
    error = codec.decode(codec.encode(x), x.numel(), x.dtype) - x
    assert (error.square().sum() / x.square().sum()).item() == pytest.approx(expected, rel=0.05)


def test_tiny_and_old_settings_errors():
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(0))

    def nmse(codec, x):
        error = (codec.decode(codec.encode(x), x.numel(), x.dtype) - x).double()
        return (error.square().sum() / x.double().square().sum()).item()

    assert nmse(Hadamard(), x * 1e-14) == pytest.approx(7.0e-4, rel=0.05)
    assert nmse(Hadamard(alpha=False), x * 1e-14) == pytest.approx(3.2e-3, rel=0.1)
    assert nmse(Hadamard(group=256, target=57734.0), x) == pytest.approx(0.96, abs=0.01)


def fields(codec, x):
    wire = codec.encode(x)
    n = wire.numel() - 8
    return wire[:n], wire[n:].view(torch.float32)


def test_golden_groups():
    codec = Hadamard()
    codes, scales = fields(codec, torch.ones(128))
    assert codes.tolist() == [0x7E] + [0] * 127
    assert scales.tolist() == pytest.approx([11.3137035, 447.99979], rel=1e-6)
    assert codec.decode(codec.encode(torch.ones(128)), 128, torch.float32).sub(1).abs().max() < 1e-6
    x = torch.zeros(128)
    x[5] = 3.0
    codes, scales = fields(codec, x)
    assert set(codes.tolist()) == {0x7E, 0xFE}
    assert scales.tolist() == pytest.approx([0.5918862, 1000.0], rel=1e-6)
    assert torch.equal(codec.decode(codec.encode(x), 128, torch.float32), x)
    codes, scales = fields(codec, torch.zeros(128))
    assert not codes.any()
    assert scales[0].item() == pytest.approx(1e-12)
    assert not codec.decode(codec.encode(torch.zeros(128)), 128, torch.float32).any()


def test_bytes():
    assert Hadamard().wire_nbytes(2**20, torch.bfloat16) == 1_114_112
    assert Hadamard(merge_scales=True).wire_nbytes(2**20, torch.bfloat16) == 1_081_344
    assert Hadamard(fmt="int8").wire_nbytes(2**20, torch.bfloat16) == 1_081_344
    assert Hadamard(fmt="int4").wire_nbytes(2**20, torch.bfloat16) == 2**19 + 2**20 // 128 * 4


def test_alpha_and_power_of_two_scales_leave_codes_alone():
    x = torch.randn(2**17, generator=torch.Generator().manual_seed(3))
    base = Hadamard().encode(x)[: 2**17]
    variants = [Hadamard(alpha=False).encode(x)] + [Hadamard().encode(x * f) for f in (2, 0.5, 16)]
    for wire in variants:
        assert (wire[: 2**17] != base).float().mean().item() <= 1e-4


def test_transform_is_orthogonal_and_its_own_inverse():
    eye = torch.eye(128, dtype=torch.float64)
    h = reference.transform(eye)
    assert (h @ h.T / 128 - eye).abs().max() <= 1e-12
    x = torch.randn(4, 128)
    twice = reference.transform(reference.transform(x)) / 128
    assert (twice - x).abs().max() <= 1e-5
    assert (reference.transform(x) - x @ h.float()).abs().max() <= 1e-4


@pytest.mark.parametrize("world", [2, 4, 8])
def test_two_shot_error(world):
    codec = Hadamard()
    n = 2**19
    x = torch.randn(world, n, generator=torch.Generator().manual_seed(world))
    wires = torch.stack([codec.encode(row) for row in x])
    total = x.sum(0)

    def nmse(y):
        return ((y - total).square().sum() / total.square().sum()).item()

    assert nmse(codec.decode_sum(wires, n, x.dtype)) == pytest.approx(6.6e-4, rel=0.05)
    two = {}
    for middle in ("fp32", "rotated"):
        arm = Hadamard(middle=middle)
        two[middle] = arm.decode_sum_encode(wires, n, x.dtype)
        y = arm.decode(two[middle], n, x.dtype)
        assert nmse(y) == pytest.approx(1.32e-3, rel=0.05)
    assert (two["fp32"][:n] != two["rotated"][:n]).float().mean().item() <= 1e-4


def test_nonfinite_policies():
    x = torch.randn(512)
    x[130] = float("nan")
    for arm in ({}, {"merge_scales": True}, {"fmt": "int8"}):
        codec = Hadamard(nonfinite="raise", **arm)
        y = codec.decode(codec.encode(x), 512, x.dtype)
        assert y[128:256].isnan().all()
        assert y[:128].isfinite().all()
        zero = Hadamard(nonfinite="zero", **arm)
        wire = zero.encode(x)
        assert not zero.decode(wire, 512, x.dtype)[128:256].any()
        assert codec.nonfinite_count(codec.encode(x), 512, x.dtype) == 1
        assert zero.nonfinite_count(wire, 512, x.dtype) == 1
