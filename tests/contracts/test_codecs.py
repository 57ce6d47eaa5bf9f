"""Every codec keeps its contracts, on any shape, dtype and value."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import (
    Bitmask,
    Blockwise,
    Cast,
    Codec,
    Hadamard,
    RandomKey,
    Subspace,
    TopK,
    encode_with_feedback,
)
from thinwire.errors import ConfigError, WireError
from thinwire.testing import contracts

KEY = RandomKey(run_key=7, tensor=1, step=2)
CODECS = {
    "raw": Cast(),
    "bf16": Cast("bf16"),
    "fp16": Cast("fp16"),
    "block2": Blockwise(bits=2, block_size=32, layout="interleaved"),
    "block4": Blockwise(bits=4),
    "block6": Blockwise(bits=6, block_size=64, meta="bf16", pad_to=1024),
    "block8": Blockwise(bits=8, block_size=256),
    "block4-symmetric": Blockwise(bits=4, symmetric=True),
    "block4-stochastic": Blockwise(bits=4, rounding="stochastic", key=KEY),
    "e4m3": Hadamard(),
    "e5m2": Hadamard(fmt="e5m2", group=32),
    "int8": Hadamard(fmt="int8", hadamard=False),
    "int4": Hadamard(fmt="int4", merge_scales=True, alpha=True),
    "e4m3-merged-zero": Hadamard(merge_scales=True, nonfinite="zero"),
    "topk-sym": TopK(k=64),
    "topk-paper": TopK(k=64, quant="paper"),
    "topk-none": TopK(k=64, quant="none", chunking="reference"),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 31, 63, 257, 2049]


def test_codecs_are_codecs():
    for codec in (*CODECS.values(), Bitmask(k=1), Subspace(dim=8, rank=2)):
        assert isinstance(codec, Codec)
        rebuilt = eval(repr(codec))
        assert rebuilt == codec


@st.composite
def tensors(draw):
    n = draw(st.sampled_from(SIZES))
    x = torch.randn(n, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    kind = draw(st.sampled_from(["normal", "zeros", "constant", "tiny", "outlier", "nan", "inf"]))
    if kind == "zeros":
        x = x * 0.0
    elif kind == "constant":
        x = torch.full((n,), draw(st.floats(-100, 100, width=32)))
    elif kind == "tiny":
        x = x * 1e-39
    elif n and kind != "normal":
        x[draw(st.integers(0, n - 1))] = {"outlier": 3e4, "nan": torch.nan, "inf": -torch.inf}[kind]
    return x.to(draw(st.sampled_from(DTYPES)))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25, deadline=None)
@given(x=tensors())
def test_contracts(name, x):
    for check in contracts.CHECKS:
        check(CODECS[name], x)


@pytest.mark.parametrize("basis", ["random", "coord"])
def test_subspace_contracts(basis):
    codec = Subspace(dim=16, rank=4, basis=basis)
    for dtype in DTYPES:
        for rows in (0, 1, 33):
            x = torch.randn(rows * 16).to(dtype)
            for check in contracts.CHECKS:
                check(codec, x)


def test_subspace_projects_and_expands():
    codec = Subspace(dim=64, rank=8, wire="fp32")
    u = codec.matrix(torch.device("cpu"))
    assert (u.T @ u - torch.eye(8)).abs().max() <= 1e-6
    inside = torch.randn(5, 8) @ u.T
    y = codec.decode(codec.encode(inside), 320, torch.float32).view(5, 64)
    assert (y - inside).abs().max() <= 1e-5
    assert codec.wire_nbytes(320, torch.bfloat16) == 5 * 8 * 4
    coord = Subspace(dim=64, rank=8, basis="coord", wire="fp32")
    x = torch.randn(5, 64)
    y = coord.decode(coord.encode(x), 320, torch.float32).view(5, 64)
    assert torch.equal(y[:, :8], x[:, :8])
    assert not y[:, 8:].any()
    with pytest.raises(ConfigError, match="rows of 64"):
        codec.encode(torch.randn(65))


@pytest.mark.parametrize("name", CODECS)
def test_bad_wires_and_dtypes_raise(name):
    codec = CODECS[name]
    wire = codec.encode(torch.randn(100))
    for bad in (wire[:-1], torch.cat([wire, wire]), wire.view(torch.int8), wire[None, None]):
        with pytest.raises(WireError):
            codec.decode(bad, 100, torch.float32)
    with pytest.raises(WireError):
        codec.encode(torch.randn(100), out=wire[:-1])
    with pytest.raises(ConfigError):
        codec.encode(torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("name", CODECS)
def test_random_bytes(name):
    """A sample of what the slow test runs 100,000 times per codec."""
    for numel in (1, 300):
        contracts.check_fuzz(CODECS[name], numel, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_many_random_bytes(name):
    contracts.check_fuzz(CODECS[name], 300, 100_000, seed=1)


def test_random_masks():
    for form in ("bits", "index12"):
        contracts.check_fuzz(Bitmask(k=20, form=form), 100, 500)


def test_stochastic_rounding_is_unbiased_and_keyed():
    x = torch.rand(64, generator=torch.Generator().manual_seed(0))
    x[0], x[1] = 0.0, 1.0
    base = Blockwise(bits=2, block_size=64, rounding="stochastic")
    total = torch.zeros(64)
    for step in range(2000):
        codec = dataclasses.replace(base, key=RandomKey(step=step))
        total += codec.decode(codec.encode(x), 64, torch.float32)
    assert (total / 2000 - x).abs().max().item() < 5 * 0.17 / 2000**0.5
    a = dataclasses.replace(base, key=RandomKey(step=1)).encode(x)
    assert torch.equal(a, dataclasses.replace(base, key=RandomKey(step=1)).encode(x))
    assert not torch.equal(a, dataclasses.replace(base, key=RandomKey(step=2)).encode(x))


@pytest.mark.parametrize("name", ["block2", "e4m3", "topk-sym"])
def test_feedback_returns_what_was_dropped(name):
    codec = CODECS[name]
    delta, residual = torch.randn(2049), torch.randn(2049) * 0.1
    total = 0.9 * residual + delta
    new = torch.empty_like(residual)
    wire = encode_with_feedback(codec, delta, residual, 0.9, new_residual=new)
    sent = codec.decode(wire, 2049, torch.float32)
    assert torch.equal(new, total - sent)
    again = encode_with_feedback(codec, delta, residual, 0.9)
    assert torch.equal(again, wire)
    assert torch.equal(residual, new)
