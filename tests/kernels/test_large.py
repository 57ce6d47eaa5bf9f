"""Ten million and three elements, strided: kernels still equal their plain form bit for bit."""

import pytest
import torch

from thinwire.lab.bench_cases import CODECS, STEPS, codec_cases, step_cases
from thinwire.testing.contracts import same_bits

pytestmark = pytest.mark.slow
NUMEL = 10**7 + 3
# Sums of floats by other means than the kernel's, or none to compare with.
UNCOMPARED = ("cast", "subspace")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [n for n in CODECS if not n.startswith(UNCOMPARED)])
def test_codec_at_ten_million(name, dtype):
    codec = CODECS[name]
    dense = torch.randn(NUMEL, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    strided = dense[:, 0]
    assert torch.equal(codec.encode(strided), codec.encode(strided.contiguous()))
    for case in codec_cases(name, NUMEL, dtype):
        buffer = case.kernel()
        result = buffer.clone()
        plain = case.reference()
        if case.direction == "decode":  # written into the same buffer
            plain = buffer
        assert same_bits(result.float(), plain.float()), case.direction


@pytest.mark.parametrize("name", [n for n in STEPS if n.startswith("mask")])
def test_masks_at_ten_million(name):
    for case in step_cases(name, NUMEL, torch.float32):
        result, plain = case.kernel(), case.reference()
        if isinstance(result, torch.Tensor):
            assert torch.equal(result, plain)
