"""CUDA tensors reach the Triton kernels through the public functions (no device: fake tensors)."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.compiled import recorded
from thinwire.kernels import adams, eco
from thinwire.kernels.adams import triton as adams_triton
from thinwire.kernels.eco import triton as eco_triton
from thinwire.kernels.random import RandomKey, uniform
from thinwire.kernels.random import triton as random_triton


def names(calls):
    return [kernel.fn.__name__ for kernel, *_ in calls]


def test_eco(monkeypatch):
    monkeypatch.setattr(eco_triton, "has_fp8", lambda device: False)
    with FakeTensorMode(), recorded(eco_triton) as calls:
        x = torch.empty(4, 64, device="cuda", dtype=torch.bfloat16)
        m, v = torch.empty(2, 4, 64, device="cuda")
        quantizer, h = eco.Quantizer("fp8_e4m3"), eco.Step(0.1, 0.9, 0.9)
        codes, scales = eco.quantize(x, quantizer, RandomKey())
        assert eco.dequantize(codes, scales, 64, quantizer).shape == (4, 64)
        assert eco.step_absmax(codes, scales, x, m, v, quantizer, h).shape == (4,)
        eco.stochastic_bf16(m, RandomKey())
        with pytest.raises(RuntimeError):  # how many scales were left alone
            eco.step_(codes, scales, x, m, v, quantizer, h)
    assert names(calls) == ["_quantize", "_dequantize", "_step_absmax", "_stochastic_bf16", "_step"]


def test_adams():
    with FakeTensorMode(), recorded(adams_triton) as calls:
        theta, m, r, statistic = torch.empty(4, 64, device="cuda")
        g = torch.empty(64, device="cuda", dtype=torch.float16)
        index = torch.empty(8, device="cuda", dtype=torch.int64)
        h = adams.Step(0.1)
        adams.adams_(theta, m, g, h)
        mean = adams.gather(m, g, r, index, 0.9)
        adams.sweep_(theta, m, g, r, index, mean, None, h, statistic=statistic)
    assert names(calls) == ["_adams", "_gather", "_sweep"]


def test_uniforms():
    with FakeTensorMode(), recorded(random_triton) as calls:
        assert uniform(8, RandomKey(), torch.device("cuda")).shape == (8,)
    assert names(calls) == ["_uniform"]
