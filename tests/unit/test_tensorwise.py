"""One scale per message: values, bytes, NaN."""

import pytest
import torch

from thinwire.codecs import Tensorwise
from thinwire.errors import ConfigError, WireError

FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0, 7e-4), "e5m2": (torch.float8_e5m2, 57344.0, 2.7e-3)}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 63, 4097])
def test_equals_its_definition(fmt, dtype, n):
    codec, (kind, top, _) = Tensorwise(fmt=fmt), FORMATS[fmt]
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    wire = codec.encode(x)
    assert wire.numel() == codec.wire_nbytes(n, dtype) == n + 4
    scale = x.float().abs().max() / top if n else torch.tensor(1e-30)
    want = ((x.float() / scale).clamp(-top, top).to(kind).float() * scale).to(dtype)
    assert torch.equal(codec.decode(wire, n, dtype), want)
    wires = torch.stack([wire, codec.encode(-2 * x)])
    rows = codec.decode(wires, n, torch.float32)
    assert torch.equal(codec.decode_sum(wires, n, dtype), rows[0] + rows[1])
    if n:
        bound = codec.facts.max_error * x.float().abs().max()
        assert (codec.decode(wire, n, torch.float32) - x.float()).abs().max() <= bound


@pytest.mark.parametrize("fmt", FORMATS)
def test_squared_error_on_normal_data(fmt):
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(1))
    codec = Tensorwise(fmt=fmt)
    y = codec.decode(codec.encode(x), x.numel(), x.dtype)
    error = ((y - x).square().sum() / x.square().sum()).item()
    assert error == pytest.approx(FORMATS[fmt][2], rel=0.05)


def test_zero_and_nonfinite_messages():
    codec = Tensorwise()
    assert not codec.decode(codec.encode(torch.zeros(9)), 9, torch.float32).any()
    for bad in (float("nan"), float("inf")):
        wire = codec.encode(torch.tensor([1.0, bad, 2.0]))
        assert codec.decode(wire, 3, torch.float32).isnan().all()
        assert (
            codec.nonfinite_count(
                torch.stack([wire, codec.encode(torch.ones(3))]), 3, torch.float32
            )
            == 1
        )


def test_errors():
    with pytest.raises(ConfigError, match="fmt must be one of"):
        Tensorwise(fmt="int8")
    with pytest.raises(ConfigError, match="float64"):
        Tensorwise().encode(torch.ones(3, dtype=torch.float64))
    with pytest.raises(WireError, match="truncated"):
        Tensorwise().decode(torch.zeros(6, dtype=torch.uint8), 3, torch.float32)
