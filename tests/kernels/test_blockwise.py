"""The blockwise CPU kernels equal their reference; golden blocks, bytes and errors."""

import itertools

import pytest
import torch

from tests.kernels.cases import same, values
from thinwire.codecs import Blockwise, RandomKey
from thinwire.kernels.blockwise import reference
from thinwire.kernels.random import reference as random_reference
from thinwire.kernels.random import uniform

KEY = RandomKey(run_key=2**63 + 9, tensor=1, step=4, offset=3)
# block size, layout, meta, symmetric, rounding: every value of each meets most of the others
ARMS = [
    (32, "split", "fp16", False, "nearest"),
    (32, "interleaved", "bf16", True, "stochastic"),
    (256, "split", "bf16", False, "stochastic"),
    (256, "interleaved", "fp16", False, "nearest"),
    (256, "split", "fp16", True, "nearest"),
    (32, "interleaved", "fp16", False, "stochastic"),
]


def encode_reference(codec, x):
    blocks = codec.num_blocks(x.numel())
    u = None
    if codec.rounding == "stochastic":
        key, tensor, step, offset = codec.key.words
        index = torch.arange(blocks * codec.block_size) + offset
        u = random_reference.uniform(index, key, tensor, step)
    return reference.encode(x, *codec._shape(x.numel()), u)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_reference(bits, dtype):
    for (size, layout, meta, symmetric, rounding), n in itertools.product(ARMS, (1, 257)):
        codec = Blockwise(
            bits=bits, block_size=size, layout=layout, meta=meta, symmetric=symmetric,
            rounding=rounding, pad_to=512, key=KEY,
        )  # fmt: skip
        for name, x in values(n, dtype).items():
            wire = encode_reference(codec, x)
            assert torch.equal(codec.encode(x), wire), (codec, name)
            y = torch.empty(1, n, dtype=dtype)
            reference.decode(wire[None], y, *codec._shape(n))
            assert same(codec.decode(wire, n, dtype), y[0]), (codec, name)


@pytest.mark.parametrize("n", [31, 63, 2049, 10**7 + 3])
def test_other_sizes_equal_reference(n):
    x = values(n)["outlier"]
    codec = Blockwise(bits=6, block_size=128)
    wire = encode_reference(codec, x)
    assert torch.equal(codec.encode(x), wire)
    y = torch.empty(1, n)
    reference.decode(wire[None], y, *codec._shape(n))
    assert torch.equal(codec.decode(wire, n, x.dtype), y[0])


def test_random_bytes_decode_as_the_reference_does():
    g = torch.Generator().manual_seed(1)
    for bits, meta, symmetric in itertools.product((2, 4, 6, 8), ("fp16", "bf16"), (False, True)):
        codec = Blockwise(bits=bits, block_size=32, meta=meta, symmetric=symmetric)
        size = (3, codec.wire_nbytes(1000, torch.float32))
        wires = torch.randint(0, 256, size, dtype=torch.uint8, generator=g)
        y = torch.empty(3, 1000)
        reference.decode(wires, y, *codec._shape(1000))
        assert same(codec.decode(wires, 1000, torch.float32), y)
        assert not y.isinf().any()


def test_uniforms_equal_reference():
    for n, offset in itertools.product((0, 1, 31, 257, 100_003), (0, 1, 5)):
        key = RandomKey(run_key=2**63 + 5, tensor=7, step=3, offset=offset)
        words = key.words
        index = torch.arange(offset, offset + n)
        assert torch.equal(uniform(n, key), random_reference.uniform(index, *words[:3]))


@pytest.mark.parametrize(
    ("bits", "scale", "payload", "sse"),
    [
        (2, 0x492B, "00505555AAAAFAFF", 275.799),
        (4, 0x4023, "00112233445566778899AABBCCDDEEFF", 11.1828),
        (6, 0x37E0, "80401888C23890445998C679E1589EE9DABEF15CDFF9DEFF", 0.635742),
        (
            8, 0x2FC8,
            "000810192129313A424A525A636B737B848C949CA4ADB5BDC5CED6DEE6EFF7FF", 0.0385902,
        ),
    ],
)  # fmt: skip
def test_golden_block(bits, scale, payload, sse):
    x = torch.arange(32.0)
    codec = Blockwise(bits=bits, block_size=32, layout="interleaved")
    wire = codec.encode(x)
    assert bytes(wire.tolist()) == bytes.fromhex(payload) + scale.to_bytes(2, "little") + b"\0\0"
    error = codec.decode(wire, 32, torch.float32) - x
    assert error.square().sum().item() == pytest.approx(sse, rel=1e-4)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [(2, [0, 1, 2, 3], "E4"), (4, [1, 2], "21"), (6, [1, 2, 3, 4], "813010")],
)
def test_packing_order(bits, codes, expected):
    padded = torch.zeros(1, 8, dtype=torch.uint8)
    padded[0, : len(codes)] = torch.tensor(codes)
    packed = reference.pack_codes(padded, bits)
    assert bytes(packed[0, : len(bytes.fromhex(expected))].tolist()) == bytes.fromhex(expected)
    assert torch.equal(reference.unpack_codes(packed, bits), padded)


def test_bytes():
    sizes = {(2, 1024): 266_240, (4, 128): 557_056, (6, 1024): 790_528, (6, 32): 917_504}
    for (bits, size), nbytes in sizes.items():
        assert Blockwise(bits=bits, block_size=size).wire_nbytes(2**20, torch.float32) == nbytes
    for bits, size in itertools.product((2, 4, 6, 8), (1024, 512, 256, 128, 64, 32)):
        codec = Blockwise(bits=bits, block_size=size)
        assert codec.wire_nbytes(2**20, torch.bfloat16) == 2**20 * (bits / 8 + 4 / size)
        assert codec.bits_per_weight == bits + 32 / size


ERRORS = {
    2: (4.01e-1, 3.49e-1, 3.00e-1, 2.51e-1, 2.03e-1, 1.54e-1),
    4: (1.57e-2, 1.38e-2, 1.19e-2, 9.98e-3, 8.05e-3, 6.11e-3),
    6: (8.93e-4, 7.83e-4, 6.74e-4, 5.65e-4, 4.56e-4, 3.47e-4),
    8: (5.45e-5, 4.78e-5, 4.11e-5, 3.46e-5, 2.80e-5, 2.13e-5),
}


def nmse(codec, x):
    error = codec.decode(codec.encode(x), x.numel(), x.dtype) - x
    return (error.square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_squared_error_on_gaussian_data(bits):
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    for size, expected in zip((1024, 512, 256, 128, 64, 32), ERRORS[bits], strict=True):
        assert nmse(Blockwise(bits=bits, block_size=size), x) == pytest.approx(expected, rel=0.05)


def test_other_arms_errors():
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    bf16 = {(6, 32): 3.56e-4, (8, 32): 2.24e-5}
    for (bits, size), expected in bf16.items():
        codec = Blockwise(bits=bits, block_size=size, meta="bf16")
        assert nmse(codec, x) == pytest.approx(expected, rel=0.05)
    assert nmse(Blockwise(bits=6, block_size=2048), x) == pytest.approx(9.96e-4, rel=0.05)
    assert nmse(Blockwise(bits=8, block_size=2048), x) == pytest.approx(6.09e-5, rel=0.05)
    assert nmse(Blockwise(bits=6, block_size=32), x * 1e-5) == pytest.approx(3.9e-4, rel=0.05)
    ratio = nmse(Blockwise(bits=4, rounding="stochastic"), x) / nmse(Blockwise(bits=4), x)
    assert ratio == pytest.approx(2.0, rel=0.05)
    symmetric = {2: (0.43, 0.75), 4: (0.94e-2, 2.0e-2), 6: (4.8e-4, 1.04e-3)}
    for bits, (low, high) in symmetric.items():
        for size in (32, 1024):
            error = nmse(Blockwise(bits=bits, block_size=size, symmetric=True), x)
            assert low * 0.95 <= error <= high * 1.05, (bits, size, error)


def test_constant_and_flagged_blocks():
    codec = Blockwise(bits=4, block_size=32)
    zeros = torch.zeros(32)
    assert torch.equal(codec.decode(codec.encode(zeros), 32, zeros.dtype), zeros)
    x = torch.randn(96)
    x[40] = float("nan")
    wire = codec.encode(x)
    y = codec.decode(wire, 96, x.dtype)
    assert y[32:64].isnan().all()
    assert y[:32].isfinite().all()
    assert codec.nonfinite_count(wire, 96, x.dtype) == 1
    x[40] = 70_000.0
    assert codec.nonfinite_count(codec.encode(x), 96, x.dtype) == 1
    bf16 = Blockwise(bits=4, block_size=32, meta="bf16")
    assert bf16.nonfinite_count(bf16.encode(x), 96, x.dtype) == 0
