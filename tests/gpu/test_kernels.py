"""On a CUDA device: every kernel equals its reference, and public functions equal the CPU's."""

import pytest
import torch

from thinwire.codecs import Bitmask, Blockwise, Hadamard, RandomKey, TopK
from thinwire.errors import WireError
from thinwire.kernels import adams, eco
from thinwire.kernels.random import uniform
from thinwire.testing.device_checks import CHECKS, mismatches, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", CHECKS)
def test_equals_reference(name):
    count, wrong = mismatches(name, CUDA)
    assert wrong == []
    assert count > 10


CODECS = [
    Blockwise(bits=6),
    Blockwise(bits=4, layout="interleaved", rounding="stochastic", key=RandomKey(step=3)),
    Blockwise(bits=2, symmetric=True, meta="bf16", block_size=8192),
    Hadamard(),
    Hadamard(fmt="e5m2", group=512, middle="cast"),
    Hadamard(fmt="int8", merge_scales=True, alpha=True, middle="rotated"),
    Hadamard(fmt="int4", nonfinite="zero"),
    TopK(),
    TopK(quant="none", k=300),
    TopK(quant="paper", level="bf16"),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codecs_equal_the_cpu(codec, dtype):
    for n in (1, 2049, 100_003):
        x = torch.randn(3, n, generator=torch.Generator().manual_seed(n)).to(dtype)
        wires = torch.stack([codec.encode(row) for row in x])
        got = torch.stack([codec.encode(row) for row in x.to(CUDA)])
        assert torch.equal(got.cpu(), wires)
        assert same(codec.decode(got, n, dtype).cpu(), codec.decode(wires, n, dtype))
        total = codec.decode_sum(wires, n, dtype)
        assert same(codec.decode_sum(got, n, dtype).cpu(), total)
        middle = codec.decode_sum_encode(wires, n, dtype)
        assert torch.equal(codec.decode_sum_encode(got, n, dtype).cpu(), middle)
        assert codec.nonfinite_count(got, n, dtype) == 0


def test_masks_equal_the_cpu():
    n = 70_001
    index = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: n // 5].sort().values
    for form in ("bits", "index12"):
        codec = Bitmask(k=index.numel(), form=form)
        wire = codec.encode_index(index.to(CUDA), n)
        assert torch.equal(wire.cpu(), codec.encode_index(index, n))
        assert torch.equal(codec.decode_index(wire, n).cpu(), index)
        wire[-1] ^= 255
        with pytest.raises(WireError):
            codec.decode_index(wire, n)


def test_optimizer_steps_equal_the_cpu():
    gen = torch.Generator().manual_seed(1)
    theta, m, r, g = (torch.randn(33, 4099, generator=gen) for _ in range(4))
    key = RandomKey(run_key=5, tensor=6, step=7)
    for fmt, group in (("fp8_e4m3", 0), ("int8", 64), ("int4", -1)):
        quantizer = eco.Quantizer(fmt, group)
        h = eco.Step(0.01, 0.9, 0.98, 1e-9, 0.1, 0.02, 0.1, -1.2)
        states = []
        for device in ("cpu", CUDA):
            codes, scales = eco.quantize(theta.to(device), quantizer, key)
            state = [codes, scales, g.to(device), m.to(device, copy=True), (r * r).to(device)]
            assert eco.step_(*state, quantizer, h, key) == 0
            values = eco.dequantize(codes, scales, theta.shape[1], quantizer)
            states.append([*state, values])
        for want, got in zip(*states, strict=True):
            assert same(got.cpu(), want), fmt
    states = []
    for device in ("cpu", CUDA):
        state = [t.to(device, copy=True).view(-1) for t in (theta, m, g, r)]
        index = adams.largest(state[3], 5000)
        mean = adams.gather(state[1], state[2], state[3], index, 0.9)
        adams.sweep_(*state, index, mean, mean * 0.1, adams.Step(0.01, weight_decay=0.1))
        adams.adams_(*state[:3], adams.Step(0.01))
        states.append([*state, index, mean, uniform(4099, key, torch.device(device))])
    for want, got in zip(*states, strict=True):
        assert same(got.cpu(), want)
