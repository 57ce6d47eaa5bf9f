"""Every Triton kernel compiles ahead of time for devices this machine lacks, without spills.

Checked in the assembler's report and in PTX: no stack or local memory, 16-byte accesses to the
tensors, no contraction or flushing of subnormals, no approximate division.
"""

import re

import pytest
import torch

from tests.kernels.compiled import compile_launch, recorded, usage, wide
from thinwire.errors import WireError
from thinwire.kernels.adams import triton as adams
from thinwire.kernels.bitmask import bits_nbytes, index12_nbytes
from thinwire.kernels.bitmask import triton as bitmask
from thinwire.kernels.blockwise import triton as blockwise
from thinwire.kernels.eco import code_columns, num_scales
from thinwire.kernels.eco import triton as eco
from thinwire.kernels.hadamard import triton as hadamard
from thinwire.kernels.random import RandomKey
from thinwire.kernels.random import triton as random
from thinwire.kernels.topk import geometry, wire_nbytes
from thinwire.kernels.topk import triton as topk

N = 2**16
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def launches(module, run):
    with recorded(module) as calls:
        run()
    return calls


def check(launch, arch, loads=0, stores=0):
    """Compile a launch, assert what every kernel must keep, and return its PTX."""
    binary = compile_launch(launch, arch)
    name, ptx = launch[0].fn.__name__, binary.asm["ptx"]
    used = usage(binary)
    assert used["STACK"] == used["LOCAL"] == 0, (name, arch, used)
    for forbidden in (r"\.ftz", r"\bfma\.", r"div\.full", r"\.approx", r"cvt\.rz\.f16"):
        assert not re.search(forbidden, ptx), (name, arch, forbidden)
    assert wide(ptx, "ld") >= loads, (name, arch, "loads", wide(ptx, "ld"))
    assert wide(ptx, "st") >= stores, (name, arch, "stores", wide(ptx, "st"))
    return ptx


def test_random():
    run = launches(random, lambda: random.uniform(torch.empty(N), 1, 2, 3, 4))
    check(run[0], 90, stores=1)
    run = launches(random, lambda: random.uniform(torch.empty(N), 1, 2, 3, 5))
    check(run[0], 80, stores=1)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize(
    ("size", "layout", "dtype", "symmetric", "stochastic", "arch"),
    [
        (128, "split", BF16, False, False, 90),
        (8192, "split", FP32, True, True, 90),
        (32, "interleaved", BF16, False, True, 80),
    ],
)
def test_blockwise(bits, size, layout, dtype, symmetric, stochastic, arch):
    shape = (N // size, size, bits, layout, "fp16", symmetric)
    wire = torch.empty(N // size * (size * bits // 8 + (2 if symmetric else 4)), dtype=torch.uint8)
    wires, x = wire.expand(4, -1), torch.empty(N, dtype=dtype)

    def run():
        blockwise.encode(x, wire, *shape, stochastic, 5, 1, 4, 0)
        blockwise.decode(wire[None], x[None], *shape)
        blockwise.decode_sum(wires, torch.empty(N), *shape)

    encode, decode, total = launches(blockwise, run)
    check(encode, arch, loads=1, stores=1 if bits == 8 and layout == "split" else 0)
    check(decode, arch, stores=1)
    check(total, arch, stores=1)


@pytest.mark.parametrize(
    ("fmt", "group", "dtype", "native", "arch"),
    [
        ("e4m3", 128, BF16, True, 90),
        ("e4m3", 128, FP32, False, 80),
        ("e5m2", 256, BF16, True, 90),
        ("int8", 128, BF16, False, 80),
        ("int4", 64, FP32, False, 90),
    ],
)
def test_hadamard(fmt, group, dtype, native, arch, monkeypatch):
    monkeypatch.setattr(hadamard, "has_fp8", lambda device: native)
    layout = hadamard.Layout(fmt, group, True, fmt[0] == "e", False, False, 448.0)
    groups = N // group
    wire = torch.empty(layout.wire_nbytes(groups), dtype=torch.uint8)
    wires, x = wire.expand(4, -1), torch.empty(N, dtype=dtype)

    def run():
        hadamard.encode(x, wire, groups, layout)
        hadamard.decode(wire[None], x[None], groups, layout)
        if dtype == BF16:
            hadamard.decode_sum(wires, torch.empty(N), groups, layout)
            hadamard.decode_sum_encode(wires, wire, groups, layout, "fp32", dtype)

    encode, decode, *others = launches(hadamard, run)
    ptx = check(encode, arch, loads=1)
    # From fp32 at once: by way of fp16 it would be rounded twice.
    assert (f"cvt.rn.satfinite.{fmt}x2.f32" in ptx) == native
    check(decode, arch, stores=1)
    for other in others:
        check(other, arch)


@pytest.mark.parametrize(
    ("shape", "quant", "dtype", "feedback", "loads", "arch"),
    [
        ((256, 256), "sym", BF16, True, 3, 90),
        ((65536,), "none", FP32, False, 1, 80),
        ((250, 250), "paper", FP32, True, 0, 90),
    ],
)
def test_topk(shape, quant, dtype, feedback, loads, arch):
    geo = geometry(shape, 64, "pad", 64)
    wire = torch.empty(wire_nbytes(geo, quant), dtype=torch.uint8)
    x, residual = torch.empty(geo.numel, dtype=dtype), torch.empty(geo.numel)
    old, new = (residual, residual.clone()) if feedback else (None, None)

    def run():
        topk.encode(x, old, new, 0.9, wire, geo, quant, "fp16")
        topk.decode(wire[None], x[None], geo, quant, "fp16")
        topk.add(wire[None], residual, geo, quant, "fp16")

    select, *others = launches(topk, run)
    check(select, arch, loads=loads, stores=1 if feedback and loads else 0)
    assert len(others) == 3 + (quant != "none")
    for other in others:
        check(other, arch)


@pytest.mark.parametrize("arch", [80, 90])
def test_bitmask(arch):
    k = 1000
    index = torch.arange(k)
    bits = torch.zeros(bits_nbytes(N), dtype=torch.uint8)
    pairs = torch.zeros(index12_nbytes(N, k), dtype=torch.uint8)

    def run():
        bitmask.to_bits(index, N, bits)
        bitmask.to_index12(index, N, pairs)
        # Nothing was launched, so nothing is found.
        with pytest.raises(WireError):
            bitmask.from_bits(bits, N, k)
        with pytest.raises(WireError):
            bitmask.from_index12(pairs, N, k)

    calls = launches(bitmask, run)
    assert len(calls) == 7
    for call in calls:
        check(call, arch)


@pytest.mark.parametrize(
    ("fmt", "group", "columns", "gradient", "moments", "key", "adam", "native", "arch"),
    [
        ("fp8_e4m3", 0, 4096, BF16, FP32, None, True, True, 90),
        ("fp8_e4m3", 0, 8192, BF16, BF16, RandomKey(), True, False, 80),
        ("int8", 0, 1024, FP32, FP32, None, False, False, 80),
        ("int4", 128, 4096, BF16, FP32, None, True, False, 90),
        ("int4", -1, 11008, BF16, FP32, RandomKey(), True, False, 90),
    ],
)
def test_eco(fmt, group, columns, gradient, moments, key, adam, native, arch, monkeypatch):
    monkeypatch.setattr(eco, "has_fp8", lambda device: native)
    quantizer = eco.Quantizer(fmt, group)
    h = eco.Step(0.01, 0.9, 0.98, 1e-9, 0.1, 0.02, 0.1, -1.2, adam)
    codes = torch.empty(16, code_columns(columns, fmt), dtype=torch.uint8)
    scales = torch.ones(num_scales(16, columns, group))
    g, m = torch.zeros(16, columns, dtype=gradient), torch.zeros(16, columns, dtype=moments)
    v = m.clone() if adam else None
    top = scales if group < 0 else None

    def run():
        eco.step(codes, scales, g, m, v, quantizer, h, key, top, columns)
        eco.quantize(g, quantizer, key, top, columns)
        eco.dequantize(codes, scales, g, quantizer)
        if group < 0:
            eco.step_absmax(codes, scales, g, m, v, quantizer, h)

    step, quantize, dequantize, *absmax = launches(eco, run)
    # Codes (8 bits), gradient and moments come in, codes and moments go out, 16 bytes at a time.
    check(step, arch, loads=3 if adam else 2, stores=2 if adam else 1)
    check(quantize, arch, loads=1)
    check(dequantize, arch, stores=1)
    for call in absmax:
        check(call, arch, loads=3)


def test_stochastic_bf16():
    x, out = torch.empty(N), torch.empty(N, dtype=BF16)
    (call,) = launches(eco, lambda: eco.stochastic_bf16(x, RandomKey(), out))
    check(call, 90, loads=1, stores=1)


@pytest.mark.parametrize(("dtype", "arch"), [(BF16, 90), (FP32, 80)])
def test_adams(dtype, arch):
    theta, m, r, statistic = (torch.empty(N) for _ in range(4))
    g, index = torch.empty(N, dtype=dtype), torch.arange(0, N, 64)
    mean = torch.empty(index.numel())
    h = adams.Step(0.01, 0.9, 0.95, 1e-8, 0.1, True, 0.5)

    def run():
        adams.adams(theta, m, g, h)
        adams.sweep(theta, m, g, r, index, mean, mean, h, statistic)
        adams.gather(m, g, r, index, h.b1, mean)

    dense, sweep, gather = launches(adams, run)
    check(dense, arch, loads=3, stores=2)
    check(sweep, arch, loads=4, stores=4)
    check(gather, arch)
