"""The top-k CPU kernels equal their reference; byte strings, sizes and errors of the format."""

import itertools

import pytest
import torch

from tests.kernels.cases import same, values
from thinwire.codecs import TopK
from thinwire.errors import WireError
from thinwire.kernels.topk import geometry, reference

SHAPES = [(0,), (1,), (63,), (2049,), (4097,), (64, 64), (100, 257), (130, 65), (3, 70, 80)]
ARMS = [
    {"quant": quant, "level": level, "chunking": chunking}
    for quant, level, chunking in itertools.product(
        ("sym", "paper", "none"), ("fp16", "bf16"), ("pad", "reference")
    )
    if level == "fp16" or quant == "sym"
]


def numel(shape):
    return torch.Size(shape).numel()


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(shape):
    n = numel(shape)
    for arm, k, dtype in itertools.product(ARMS, (1, 64, 129), (torch.float32, torch.bfloat16)):
        codec = TopK(shape=shape, k=k, **arm)
        geo = codec.geometry(n)
        for name, x in values(n, dtype).items():
            wire = reference.encode(x, geo, codec.quant, codec.level)
            got = codec.encode(x)
            assert torch.equal(got, wire), (codec, name)
            y = torch.empty(1, n, dtype=dtype)
            reference.decode(wire[None], y, geo, codec.quant, codec.level)
            assert same(codec.decode(wire, n, dtype), y[0]), (codec, name)
            if n:
                entries = reference.entries(wire, geo, codec.quant, codec.level)
                for a, b in zip(codec.entries(wire, n), entries, strict=True):
                    assert same(a, b), (codec, name)


@pytest.mark.parametrize("shape", [(4097,), (100, 257)])
def test_feedback_equals_reference(shape):
    n = numel(shape)
    for arm, dtype in itertools.product(ARMS, (torch.float32, torch.bfloat16)):
        codec = TopK(shape=shape, k=64, **arm)
        delta = values(n, dtype)["outlier"]
        residual = values(n)["normal"].flip(0).contiguous()
        new = torch.full((n,), float("nan"))
        wire = codec.encode_feedback(delta, residual, 0.95, new_residual=new)
        expected = reference.feedback(
            delta, residual, 0.95, codec.geometry(n), codec.quant, codec.level
        )
        assert torch.equal(wire, expected[0]), codec
        assert same(new, expected[1]), codec


def test_sum_adds_in_rank_order():
    codec = TopK(shape=(100, 257), k=400)
    x = torch.randn(3, 25700)
    wires = torch.stack([codec.encode(row) for row in x])
    rows = codec.decode(wires, 25700, torch.float32)
    assert torch.equal(codec.decode_sum(wires, 25700, torch.float32), (rows[0] + rows[1]) + rows[2])


def sections(codec, values_):
    x = torch.tensor(values_, dtype=torch.float32)
    return codec.encode(x), codec.decode(codec.encode(x), x.numel(), x.dtype)


def test_quantizer_golden_values():
    v = [1, -2, 3, -4, 5, -6, 7, -8]
    every = 4096
    wire, y = sections(TopK(k=every), v)
    assert wire[:4].tolist() == [0x00, 0x41, 0x80, 0x46]
    assert wire[16:18].tolist() == [0x44, 0xEE]
    assert y.tolist() == [2.5, -2.5, 2.5, -2.5, 6.5, -6.5, 6.5, -6.5]
    wire, y = sections(TopK(k=every, quant="paper"), v)
    assert wire[:20].view(torch.float32).tolist() == [-0.5, 0, -6.5, 0, 6.5]
    assert y.tolist() == [-0.5, -0.5, -0.5, -0.5, 6, -7, 6, -7]
    v = [4, -3, 2.5, -2, 2, -1.5, 1, -6]
    assert sections(TopK(k=every), v)[1].tolist() == [5, -2, 2, -2, 2, -2, 2, -5]
    wire, _ = sections(TopK(k=every, quant="paper"), v)
    assert wire[:20].view(torch.float32).tolist() == [-0.375, 0, -4.125, 0.25, 3.625]


def test_constant_and_zero_values():
    _, y = sections(TopK(k=4096), [3.0] * 8)
    assert y.tolist() == [3.0] * 8
    _, y = sections(TopK(k=4096, quant="paper"), [3.0] * 8)
    assert y.tolist() == [3.0] * 8
    for quant in ("sym", "paper", "none"):
        assert not sections(TopK(k=512, quant=quant), [0.0] * 64)[1].any()


def test_indices_pack_to_12_bits():
    x = torch.zeros(4096)
    x[[0x123, 0x456]] = 1.0
    wire = TopK(k=2, quant="none").encode(x)
    assert wire[:3].tolist() == [0x23, 0x61, 0x45]
    x = torch.zeros(4096)
    x[[1, 4095]] = 1.0
    assert TopK(k=2, quant="none").encode(x)[:3].tolist() == [0x01, 0xF0, 0xFF]


def test_ties_go_to_the_lower_index():
    x = torch.tensor([1.0, 2, 2, 2, 0])
    codec = TopK(k=2 * 4096 // 5, quant="none")
    assert codec.geometry(5).k.tolist() == [2]
    assert codec.decode(codec.encode(x), 5, x.dtype).tolist() == [0, 2, 2, 0, 0]


def test_message_bytes():
    assert TopK(k=128, shape=(257, 257)).wire_nbytes(257 * 257, torch.float32) == 3720
    assert TopK(k=128, shape=(100, 257)).wire_nbytes(25700, torch.float32) == 1448
    per_tile = {("sym", 64): 116, ("sym", 128): 228, ("sym", 32): 60}
    for (quant, k), nbytes in per_tile.items():
        assert TopK(k=k, quant=quant, shape=(64, 64)).wire_nbytes(4096, torch.float32) == nbytes
    paper = TopK(k=64, quant="paper", shape=(64, 64))
    assert paper.wire_nbytes(4096, torch.float32) == 112 + 20


def test_llama_sizes():
    """Payload of the 178M model: 9 layers, d 1024, ffn 2688, vocabulary 32,000, norms dense."""
    d, layers, ffn, vocab = 1024, 9, 2688, 32000
    shapes = [(vocab, d)] * 2 + ([(d, d)] * 4 + [(ffn, d)] * 2 + [(d, ffn)]) * layers
    dense = 2 * d * (2 * layers + 1)
    for k, sym, paper in ((64, 5_068_672, 4_896_532), (128, 9_924_992, 9_752_852)):
        for quant, expected in (("sym", sym), ("paper", paper)):
            total = sum(
                TopK(k=k, quant=quant, shape=s).wire_nbytes(s[0] * s[1], torch.float32)
                for s in shapes
            )
            assert total + dense == expected


@pytest.mark.parametrize(
    ("draw", "k", "sym", "paper"),
    [
        ("gauss", 32, 0.0028, 0.0098),
        ("gauss", 64, 0.0039, 0.0126),
        ("gauss", 128, 0.0055, 0.0169),
        ("laplace", 32, 0.0082, 0.0285),
        ("laplace", 64, 0.0115, 0.0361),
        ("laplace", 128, 0.0161, 0.0567),
    ],
)
def test_error_on_kept_values(draw, k, sym, paper):
    torch.manual_seed(0)
    n = 512 * 4096
    x = torch.randn(n) if draw == "gauss" else torch.distributions.Laplace(0, 1).sample((n,))
    for quant, expected in (("sym", sym), ("paper", paper)):
        codec = TopK(k=k, quant=quant)
        exact = TopK(k=k, quant="none")
        kept = exact.decode(exact.encode(x), n, x.dtype)
        y = codec.decode(codec.encode(x), n, x.dtype)
        error = ((y - kept).square().sum() / kept.square().sum()).item()
        assert error == pytest.approx(expected, rel=0.1)


def test_impossible_indices_raise():
    codec = TopK(k=64, shape=(100, 257))
    wire = codec.encode(torch.randn(25700))
    wire[4 * codec.geometry(25700).chunks] ^= 255
    wire[4 * codec.geometry(25700).chunks + 1] ^= 255
    with pytest.raises(WireError, match="indices"):
        codec.decode(wire, 25700, torch.float32)
    with pytest.raises(WireError, match="indices"):
        codec.decode_sum(wire[None], 25700, torch.float32)
    with pytest.raises(WireError, match="indices"):
        codec.entries(wire, 25700)


def test_nonfinite_chunks_are_flagged():
    x = torch.randn(3 * 4096)
    x[5000] = float("inf")
    for quant, count in (("sym", 1), ("paper", 1), ("none", 64)):
        codec = TopK(quant=quant)
        wire = codec.encode(x)
        assert codec.nonfinite_count(wire, x.numel(), x.dtype) == count
        with pytest.raises(WireError):
            codec.check_finite(wire, x.numel(), x.dtype)


def test_geometry_of_edges():
    geo = geometry((257, 257), 128, "pad", 64)
    assert sorted(set(geo.k.tolist())) == [1, 2, 128]
    assert geo.chunks == 25
