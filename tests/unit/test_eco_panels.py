"""8-bit moments: the panel-wise step equals the step in whole passes, bit for bit."""

import pytest
import torch
from torch import nn

from thinwire import eco
from thinwire.eco import panels
from thinwire.eco.optimizer import EcoOptimizer
from thinwire.errors import NonFiniteError


def make(fmt, granularity, rounding, shape):
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    generator = torch.Generator().manual_seed(0)
    model[0].weight.data.copy_(torch.randn(shape, generator=generator))
    eco.quantize_(model, fmt, granularity=granularity, filter=lambda *_: True)
    return model, eco.EcoAdamW(model.parameters(), lr=1e-2, state_dtype="8bit", rounding=rounding)


def train(model, optimizer, shape, steps=3):
    for step in range(steps):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        model[0].weight.grad = g
        optimizer.step()
    return optimizer.state_dict()["state"][0], eco.local_quantized(model[0].weight)


@pytest.mark.parametrize("rounding", ["sr", "rtn"])
@pytest.mark.parametrize(
    ("fmt", "granularity", "shape"),
    [
        ("fp8_e4m3", "row", (33, 96)),
        ("fp8_e4m3", "tensor", (33, 96)),
        ("int8", "row", (7, 1024)),
        ("int4", "group:32", (33, 96)),
        ("int4", "tensor", (64, 300)),
        ("int8", "row", (5, 257)),
    ],
)
def test_panels_equal_whole_passes(monkeypatch, fmt, granularity, rounding, shape):
    monkeypatch.setattr(panels, "PANEL", 1024)  # several panels, the last one short
    panelled, weight = train(*make(fmt, granularity, rounding, shape), shape)
    monkeypatch.setattr(EcoOptimizer, "_fusible", lambda *_: False)
    whole, expected = train(*make(fmt, granularity, rounding, shape), shape)
    assert torch.equal(weight.codes, expected.codes)
    assert set(panelled) == set(whole)
    for key, value in whole.items():
        assert torch.equal(panelled[key], value), key


def test_a_step_to_infinity_is_told():
    model, optimizer = make("fp8_e4m3", "row", "sr", (4, 64))
    model[0].weight.grad = torch.ones(4, 64)
    optimizer.param_groups[0]["lr"] = 1e38
    optimizer.param_groups[0]["weight_decay"] = 1e38
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        optimizer.step()
