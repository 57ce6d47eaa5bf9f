"""Check the Triton kernels against their references: on a CUDA device, or interpreted on the CPU.

Each check yields (label, what the kernel wrote, what the reference says); references run on the
CPU. `benchmarks/gpu.py`, the tests of the interpreter and `tests/gpu` share them.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels import adams, blockwise, eco, hadamard, topk
from thinwire.kernels.adams import reference as adams_reference
from thinwire.kernels.bitmask import reference as bitmask_reference
from thinwire.kernels.blockwise import reference as blockwise_reference
from thinwire.kernels.eco import reference as eco_reference
from thinwire.kernels.hadamard import reference as hadamard_reference
from thinwire.kernels.parallel import backend
from thinwire.kernels.random import RandomKey
from thinwire.kernels.random import reference as random_reference
from thinwire.kernels.topk import reference as topk_reference

__all__ = ["CHECKS", "mismatches", "same", "samples"]

Result = Iterator[tuple[str, Tensor, Tensor]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEY = RandomKey(run_key=2**63 + 9, tensor=2**32 - 5, step=4)
NAN, INF = float("nan"), float("inf")


def samples(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return runs of n values of every kind in one tensor [13n]; a few are NaN or infinite."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    outlier, nan, inf = x.clone(), x.clone(), x.clone()
    if n:
        outlier[n // 2], nan[n // 2], inf[n // 3] = 3e4, NAN, -INF
    finite = (
        x, x * 1e-7, x * 1e6, torch.zeros(n), -torch.zeros(n), torch.full((n,), 3.3), x * 1e-40,
        outlier, torch.round(x), torch.round(2 * x) / 2, x * 1e-30,
    )  # fmt: skip
    return torch.cat([*finite, nan, inf]).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit, any NaN equal to any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    equal = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
    return bool(equal.all())


def unset(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose every element must be written: NaN, or 0xAA bytes."""
    if dtype == torch.uint8:
        return torch.full(shape, 0xAA, dtype=dtype, device=device)
    return torch.full(shape, NAN, dtype=dtype, device=device)


def check_random(device: torch.device) -> Result:
    """Yield uniforms at aligned and other offsets."""
    kernel = backend("thinwire.kernels.random", "triton").uniform
    for n, offset in itertools.product((0, 1, 63, 2049), (0, 4, 7, 2**33 + 2)):
        u = unset(n, dtype=torch.float32, device=device)
        key, tensor, step, _ = KEY.words
        kernel(u, key, tensor, step, offset)
        index = torch.arange(offset, offset + n)
        yield f"uniform {n} {offset}", u, random_reference.uniform(index, key, tensor, step)


# block size, layout, meta, symmetric, stochastic, offset of the key
BLOCKWISE_ARMS = (
    (32, "split", "fp16", False, False, 0),
    (64, "interleaved", "bf16", True, True, 8),
    (128, "split", "bf16", False, True, 3),
    (128, "interleaved", "fp16", False, False, 0),
    (256, "split", "fp16", True, False, 0),
    (32, "interleaved", "fp16", False, True, 4),
)


def check_blockwise(device: torch.device) -> Result:
    """Yield messages, values and sums over bits, arms, dtypes and sizes."""
    for bits, (i, arm), n in itertools.product(
        (2, 4, 6, 8), enumerate(BLOCKWISE_ARMS), (0, 1, 31, 257)
    ):
        # Every arm meets half of the widths, and small sizes one arm per width.
        if (i + bits // 2) % 2 or (n < 257 and i > 1):
            continue
        size, layout, meta, symmetric, stochastic, offset = arm
        dtype = DTYPES[(i + bits // 2 + n) % 3]
        x = samples(n, dtype) if n == 257 else samples(n, dtype)[:n]
        n = x.numel()
        blocks = -(-n // 512) * (512 // size)
        shape = (blocks, size, bits, layout, meta, symmetric)
        key, tensor, step, _ = KEY.words
        index = torch.arange(blocks * size) + offset
        u = random_reference.uniform(index, key, tensor, step) if stochastic else None
        want = blockwise_reference.encode(x, *shape, u)
        # An odd place for the message where the offset is odd: no word may be assumed aligned.
        room = unset(want.numel() + 1, dtype=torch.uint8, device=device)
        out = room[offset % 2 :][: want.numel()]
        blockwise._encode_cuda(x.to(device), out, *shape, stochastic, key, tensor, step, offset)
        label = f"{bits} bits {dtype} {n} {shape}"
        yield f"encode {label}", out, want
        noise = torch.randint(0, 256, want.shape, dtype=torch.uint8)
        wires = torch.stack([want, noise])
        expected = torch.empty(2, n, dtype=dtype)
        blockwise_reference.decode(wires, expected, *shape)
        got = unset(2, n, dtype=dtype, device=device)
        blockwise._decode_cuda(wires.to(device), got, *shape)
        yield f"decode {label}", got, expected
        values = torch.empty(2, n)
        blockwise_reference.decode(wires, values, *shape)
        total = unset(n, dtype=torch.float32, device=device)
        blockwise._sum_cuda(wires.to(device), total, *shape)
        yield f"sum {label}", total, values[0] + values[1]


# format, group, rotate, alpha, merge, zero, target, middle
HADAMARD_ARMS = (
    ("e4m3", 128, True, True, False, False, 448.0, "fp32"),
    ("e4m3", 64, True, True, True, False, 448.0, "rotated"),
    ("e4m3", 32, False, True, False, True, 448.0, "fp32"),
    ("e4m3", 512, True, True, False, True, 240.0, "cast"),
    ("e5m2", 128, True, True, False, False, 57344.0, "cast"),
    ("e5m2", 256, True, False, False, True, 57344.0, "rotated"),
    ("int8", 128, True, False, False, False, 127.0, "rotated"),
    ("int8", 64, True, True, True, True, 127.0, "cast"),
    ("int4", 32, True, False, False, False, 7.0, "fp32"),
    ("int4", 128, True, True, False, False, 7.0, "rotated"),
)


def check_hadamard(device: torch.device) -> Result:
    """Yield messages, values, sums and two-shot middles over formats, arms, dtypes and sizes."""
    for (i, arm), n in itertools.product(enumerate(HADAMARD_ARMS), (0, 1, 63, 257)):
        if n < 257 and i % 3:
            continue
        layout, middle = hadamard.Layout(*arm[:7]), arm[7]
        dtype = DTYPES[(i + n) % 3]
        x = samples(n, dtype) if n == 257 else samples(n, dtype)[:n]
        n = x.numel()
        groups = -(-n // layout.group)
        label = f"{dtype} {n} {arm}"
        want = hadamard_reference.encode(x, groups, layout)
        out = unset(want.numel(), dtype=torch.uint8, device=device)
        hadamard._encode_cuda(x.to(device), out, groups, *arm[:7])
        yield f"encode {label}", out, want
        noise = torch.randint(0, 256, want.shape, dtype=torch.uint8)
        odd = torch.tensor([0.0, -0.0, 1e-12, -1e-12, 1e-3, 1e3, INF, 1.0, -1.0])
        odd = odd.repeat(2 * groups).view(torch.uint8)[: want.numel() - groups * layout.code_bytes]
        noise[groups * layout.code_bytes :] = odd
        other = hadamard_reference.encode(x.flip(0), groups, layout)
        wires = torch.stack([want, other, noise])
        expected = torch.empty(3, n, dtype=dtype)
        hadamard_reference.decode(wires, expected, groups, layout)
        got = unset(3, n, dtype=dtype, device=device)
        hadamard._decode_cuda(wires.to(device), got, groups, *arm[:7])
        yield f"decode {label}", got, expected
        values = torch.empty(3, n)
        hadamard_reference.decode(wires, values, groups, layout)
        total = unset(n, dtype=torch.float32, device=device)
        hadamard._decode_sum_cuda(wires.to(device), total, groups, *arm[:7])
        yield f"sum {label}", total, values[0] + values[1] + values[2]
        want = hadamard_reference.decode_sum_encode(wires[:2], groups, layout, middle, dtype)
        out = unset(want.numel(), dtype=torch.uint8, device=device)
        hadamard._middle_cuda(wires[:2].to(device), out, groups, *arm, dtype)
        yield f"middle {label}", out, want


# shape, k, chunking, tile, quant, level
TOPK_ARMS = (
    ((70, 130), 64, "pad", 64, "sym", "fp16"),
    ((100, 66), 129, "reference", 64, "sym", "bf16"),
    ((4097,), 64, "pad", 64, "none", "fp16"),
    ((3, 70, 80), 33, "pad", 32, "sym", "bf16"),
    ((70, 64), 40, "pad", 64, "paper", "fp16"),
    ((63,), 700, "pad", 64, "sym", "fp16"),
    ((40, 2), 4096, "pad", 64, "sym", "bf16"),
    ((0,), 64, "pad", 64, "sym", "fp16"),
    ((1,), 64, "pad", 64, "none", "fp16"),
)


def check_topk(device: torch.device) -> Result:
    """Yield messages, residuals, values, sums and refusals over quantizers, cuts and dtypes."""
    for (i, arm), kind in itertools.product(enumerate(TOPK_ARMS), range(4)):
        shape, k, chunking, tile, quant, level = arm
        n, dtype = torch.Size(shape).numel(), DTYPES[(i + kind) % 3]
        if kind and (n < 2 or (i + kind) % 2):
            continue
        x = samples(n)
        x = (x[:n], torch.round(x[:n]), x[-n:], x[7 * n : 8 * n])[kind].to(dtype) if n else x[:0]
        geo = topk.geometry(shape, k, chunking, tile)
        args = (list(shape), k, chunking, tile, quant, level)
        label = f"{dtype} {kind} {arm}"
        want = topk_reference.encode(x, geo, quant, level)
        out = unset(want.numel(), dtype=torch.uint8, device=device)
        topk._encode_cuda(x.to(device), out, *args)
        yield f"encode {label}", out, want
        if n == 0:
            continue
        residual = samples(n)[:n].flip(0).contiguous()
        sent, rest = topk_reference.feedback(x, residual, 0.95, geo, quant, level)
        out = unset(want.numel(), dtype=torch.uint8, device=device)
        new = unset(n, dtype=torch.float32, device=device)
        topk._feedback_cuda(x.to(device), residual.to(device), new, 0.95, out, *args)
        yield f"feedback message {label}", out, sent
        yield f"residual {label}", new, rest
        wires = torch.stack([want, sent])
        expected = torch.empty(2, n, dtype=dtype)
        topk_reference.decode(wires, expected, geo, quant, level)
        got = unset(2, n, dtype=dtype, device=device)
        topk._decode_cuda(wires.to(device), got, *args)
        yield f"decode {label}", got, expected
        values = torch.empty(2, n)
        topk_reference.decode(wires, values, geo, quant, level)
        total = torch.zeros(n, device=device)
        topk._add_cuda(wires.to(device), total, *args)
        yield f"sum {label}", total, torch.zeros(n) + values[0] + values[1]
        wires[:, topk.wire_nbytes(geo, quant) // 2 :] = 255
        yield f"refusal {label}", *_refusal(wires, geo, args, device)


def _refusal(
    wires: Tensor, geo: topk.Geometry, args: tuple[Any, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return whether kernel and reference refuse a message."""
    refused = []
    for run in (
        lambda out: topk._decode_cuda(wires.to(device), out.to(device), *args),
        lambda out: topk_reference.decode(wires, out, geo, *args[4:]),
    ):
        try:
            run(torch.empty(len(wires), geo.numel))
            refused.append(torch.tensor([0]))
        except WireError:
            refused.append(torch.tensor([1]))
    return refused[0], refused[1]


def check_bitmask(device: torch.device) -> Result:
    """Yield both forms, both ways, and what is refused, over sizes and densities."""
    kernel = backend("thinwire.kernels.bitmask", "triton")
    reference = bitmask_reference
    forms = (
        (kernel.to_bits, reference.to_bits, kernel.from_bits, reference.from_bits),
        (kernel.to_index12, reference.to_index12, kernel.from_index12, reference.from_index12),
    )
    for n, (i, form) in itertools.product((0, 1, 8, 63, 4097, 20_000), enumerate(forms)):
        write, write_reference, read, read_reference = form
        for k in sorted({0, min(n, 1), n // 100, n // 3, n}):
            index = torch.randperm(n, generator=torch.Generator().manual_seed(n))[:k].sort().values
            label = f"{('bits', 'index12')[i]} {n} {k}"
            want = write_reference(index, n)
            out = unset(want.numel() + 1, dtype=torch.uint8, device=device)[1:]
            write(index.to(device), n, out)
            yield f"write {label}", out, want
            yield f"read {label}", read(want.to(device), n, k), index
            for place in (0, want.numel() // 2, want.numel() - 1)[: want.numel()]:
                changed = want.clone()
                changed[place] ^= 0x81
                got, expected = (
                    _read(read, changed.to(device), n, k),
                    _read(read_reference, changed, n, k),
                )
                yield f"refusal {label} {place}", got, expected


def _read(read: Callable[..., Tensor], wire: Tensor, n: int, k: int) -> Tensor:
    """Return what a message holds, or -1 if it is refused."""
    try:
        return read(wire, n, k)
    except WireError:
        return torch.tensor([-1])


# format, group, pow2, stochastic, Adam, gradient, moments, shape
ECO_ARMS = (
    ("fp8_e4m3", 0, False, False, True, torch.bfloat16, torch.bfloat16, (5, 257)),
    ("fp8_e4m3", 0, True, True, True, torch.float32, torch.float32, (4, 256)),
    ("fp8_e4m3", -1, False, True, False, torch.float32, torch.float32, (3, 31)),
    ("fp8_e4m3", 32, False, False, True, torch.float16, torch.float32, (5, 100)),
    ("int8", 0, False, True, True, torch.float32, torch.bfloat16, (7, 63)),
    ("int8", -1, True, False, True, torch.bfloat16, torch.float32, (4, 256)),
    ("int8", 5, False, False, False, torch.float32, torch.float32, (3, 31)),
    ("int4", 0, False, False, True, torch.float32, torch.float32, (4, 31)),
    ("int4", 32, True, True, True, torch.bfloat16, torch.float32, (6, 257)),
    ("int4", -1, False, True, False, torch.float32, torch.float32, (2, 9000)),
    ("fp8_e4m3", 0, False, True, True, torch.float32, torch.float32, (2, 9000)),
    ("int4", 0, False, True, True, torch.float32, torch.bfloat16, (1, 8193)),
    ("int8", 0, False, False, True, torch.float32, torch.float32, (1, 1)),
)


def check_eco(device: torch.device) -> Result:
    """Yield codes, scales, values, magnitudes and steps over formats, granularities and dtypes."""
    kernel = backend("thinwire.kernels.eco", "triton")
    h = eco.Step(0.01, 0.9, 0.98, 1e-9, 0.1, 0.02, 0.1, -1.2)
    for i, arm in enumerate(ECO_ARMS):
        fmt, group, pow2, stochastic, adam, g_dtype, m_dtype, shape = arm
        quantizer, hh = eco.Quantizer(fmt, group, pow2), replace(h, adam=adam)
        stride = shape[1] + 4 * (i % 2)  # a shard of a wider matrix
        key = replace(KEY, offset=3 * (i % 3)) if stochastic else None
        u = None
        if key is not None:
            row = torch.arange(shape[0])[:, None] * stride + key.offset
            words = key.words
            u = random_reference.uniform(row + torch.arange(shape[1]), *words[:3])
        gen = torch.Generator().manual_seed(i)
        x, g, m = (torch.randn(shape, generator=gen) * s for s in (1.0, 0.1, 0.01))
        x[shape[0] // 2, ::3] = 0.0
        codes, scales = eco_reference.quantize(x, quantizer, u)
        got = kernel.quantize(x.to(device), quantizer, key, None, stride)
        yield f"codes {arm}", got[0], codes
        yield f"scales {arm}", got[1], scales
        out = unset(*shape, dtype=m_dtype, device=device)
        kernel.dequantize(codes.to(device), scales.to(device), out, quantizer)
        values = eco_reference.dequantize(codes, scales, shape[1], quantizer)
        yield f"values {arm}", out, values.to(m_dtype)
        g, m = g.to(g_dtype), m.to(m_dtype)
        v = (m.float() ** 2).to(m_dtype) if adam else None
        top = eco_reference.step_absmax(codes, scales, g, m, v, quantizer, hh)
        copy = [None if t is None else t.to(device) for t in (codes, scales, g, m, v)]
        yield f"magnitudes {arm}", kernel.step_absmax(*copy, quantizer, hh), top
        for broken, given in ((False, group < 0), (True, group < 0), (False, True)):
            if broken:
                g = g.clone()
                g[-1, shape[1] // 2] = NAN
            magnitude = None
            if given:
                magnitude = eco_reference.step_absmax(codes, scales, g, m, v, quantizer, hh) * 1.25
            state = (codes.clone(), scales.clone(), g, m.clone(), None if v is None else v.clone())
            copy = [None if t is None else t.to(device, copy=True) for t in state]
            left = kernel.step(
                *copy, quantizer, hh, key, None if magnitude is None else magnitude.to(device),
                stride,
            )  # fmt: skip
            bad = eco_reference.step(*state, quantizer, hh, u, magnitude)
            yield f"left alone {arm}", torch.tensor(left), torch.tensor(bad)
            for name, a, b in zip(("codes", "scales", "g", "m", "v"), copy, state, strict=True):
                if a is not None and b is not None:
                    yield f"step {name} {broken} {given} {arm}", a, b
    yield from _check_stochastic_bf16(device)


def _check_stochastic_bf16(device: torch.device) -> Result:
    kernel = backend("thinwire.kernels.eco", "triton").stochastic_bf16
    for n, offset in ((31, 0), (257, 5)):
        x, (run_key, tensor, step, _) = samples(n), KEY.words
        index = torch.arange(x.numel()) + offset
        counter = (
            index >> 2, index * 0, torch.full_like(index, step),
            torch.full_like(index, tensor & 0xFFFFFFFF),
        )  # fmt: skip
        words = random_reference.philox(counter, run_key).gather(1, (index & 3)[:, None])[:, 0]
        out = unset(x.numel(), dtype=torch.bfloat16, device=device)
        kernel(x.to(device), replace(KEY, offset=offset), out)
        yield f"stochastic bf16 {n} {offset}", out, eco_reference.stochastic_bf16(x, words)


def check_adams(device: torch.device) -> Result:
    """Yield dense steps, gathers and sweeps over densities, rules, dtypes and sizes."""
    kernel = backend("thinwire.kernels.adams", "triton")
    cases = itertools.product((0, 1, 31, 2049), (0.0, 0.05, 1.0), (True, False))
    for i, (n, density, transfer) in enumerate(cases):
        h = adams.Step(0.01, 0.9, 0.95, 1e-8, 0.1 * (i % 2), transfer, (1.0, 0.4)[i // 2 % 2])
        gen = torch.Generator().manual_seed(i)
        theta, m, r, g = (torch.randn(n, generator=gen) * s for s in (1.0, 0.1, 0.01, 1.0))
        g = g.to(DTYPES[i % 3])
        label = f"{n} {density} {g.dtype} {h}"
        index = torch.randperm(n, generator=gen)[: round(n * density)].sort().values
        dense = [theta.to(device, copy=True), m.to(device, copy=True)]
        kernel.adams(*dense, g.to(device), h)
        new_theta, new_m = theta.clone(), m.clone()
        adams_reference.adams(new_theta, new_m, g, h)
        yield f"adams theta {label}", dense[0], new_theta
        yield f"adams m {label}", dense[1], new_m
        x = adams_reference.gather(m, g, r, index, h.b1)
        out = unset(index.numel(), dtype=torch.float32, device=device)
        kernel.gather(*(t.to(device) for t in (m, g, r, index)), h.b1, out)
        yield f"gather {label}", out, x
        mean, kept = x * 0.7, x * 1e-3 if i % 2 else None
        for owned, counted in (((True, False), (False, True), (True, True))[i % 3],):
            a = [t.to(device, copy=True) for t in (theta, m, r, torch.full((n,), NAN))]
            b = [theta.clone(), m.clone(), r.clone(), torch.full((n,), NAN)]
            kernel.sweep(
                a[0] if owned else None, a[1], g.to(device), a[2], index.to(device),
                mean.to(device), None if kept is None else kept.to(device), h,
                a[3] if counted else None,
            )  # fmt: skip
            adams_reference.sweep(
                b[0] if owned else None, b[1], g, b[2], index, mean, kept, h,
                b[3] if counted else None,
            )  # fmt: skip
            for name, got, expected in zip(("theta", "m", "r", "statistic"), a, b, strict=True):
                yield f"sweep {name} {owned} {counted} {label}", got, expected


def check_largest(device: torch.device) -> Result:
    """Yield mask positions, which torch selects on a device, over sizes, ties and densities."""
    for n, kind in itertools.product((1, 63, 4097), range(3)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).abs()
        x = (x, torch.round(2 * x), torch.zeros(n))[kind]
        for k in sorted({1, n // 10 + 1, n}):
            got = adams._largest_by_threshold(x.to(device), k)
            yield f"largest {n} {kind} {k}", got, adams_reference.largest(x, k)


CHECKS: dict[str, Callable[[torch.device], Result]] = {
    "random": check_random,
    "blockwise": check_blockwise,
    "hadamard": check_hadamard,
    "topk": check_topk,
    "bitmask": check_bitmask,
    "eco": check_eco,
    "adams": check_adams,
    "largest": check_largest,
}


def mismatches(name: str, device: torch.device) -> tuple[int, list[str]]:
    """Return how many comparisons a check made and what differed, one line each."""
    count, wrong = 0, []
    for label, got, want in CHECKS[name](device):
        count += 1
        have = got.cpu()
        if not same(have, want):
            wrong.append(f"{name} {label}: {_difference(have, want)}")
    return count, wrong


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
    found: Any = [
        (i, x, y)
        for i, (x, y) in enumerate(zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True))
        if x != y and not (x != x and y != y)
    ]
    first = found[0] if found else "a zero's sign"
    return f"{len(found)} of {a.numel()} differ, the first (index, kernel, reference): {first}"
