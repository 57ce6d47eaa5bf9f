"""What `thinwire bench codecs` times: every codec and fused step, beside its plain reference.

Legend: `N` elements, `W` wire bytes, `R` messages. A case's `moved_nbytes` counts each byte that
the operation must read once and write once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Bitmask, Blockwise, Cast, Codec, Hadamard, RandomKey, Subspace, TopK
from thinwire.kernels import adams, bitmask, eco, topk
from thinwire.kernels.adams import reference as adams_reference
from thinwire.kernels.bitmask import reference as bitmask_reference
from thinwire.kernels.blockwise import reference as blockwise_reference
from thinwire.kernels.eco import reference as eco_reference
from thinwire.kernels.hadamard import reference as hadamard_reference
from thinwire.kernels.random import reference as random_reference
from thinwire.kernels.topk import reference as topk_reference

__all__ = ["CODECS", "STEPS", "Case", "codec_cases", "step_cases"]

KEY = RandomKey(run_key=1, tensor=2, step=3)
# Messages that a sum adds: the ranks of a small group.
SUMMED = 4
# Channels of a subspace's rows; sizes are cut to a multiple.
DIM = 1024

CODECS: dict[str, Codec] = {
    "cast-bf16": Cast("bf16"),
    "block2": Blockwise(bits=2, block_size=32),
    "block4": Blockwise(bits=4, block_size=64),
    "block6": Blockwise(bits=6, block_size=128),
    "block8": Blockwise(bits=8, block_size=256),
    "block6-interleaved": Blockwise(bits=6, block_size=128, layout="interleaved"),
    "block8-symmetric": Blockwise(bits=8, block_size=2048, symmetric=True),
    "block4-stochastic": Blockwise(bits=4, block_size=64, rounding="stochastic", key=KEY),
    "hadamard-e4m3": Hadamard(),
    "hadamard-e5m2": Hadamard(fmt="e5m2"),
    "hadamard-int8": Hadamard(fmt="int8"),
    "topk-sym": TopK(k=64),
    "topk-paper": TopK(k=64, quant="paper"),
    "subspace-random": Subspace(dim=DIM, rank=DIM // 8),
    "subspace-coord": Subspace(dim=DIM, rank=DIM // 8, basis="coord"),
}
STEPS = (
    "mask-bits", "mask-index12", "mask-select", "feedback-topk", "adams-step", "scape-sweep",
    "eco-fp8-sr-step", "eco-fp8-rtn-step", "eco-int4-sr-step",
)  # fmt: skip

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one size and dtype.

    Attributes:
        name: of the codec or step.
        direction: "encode", "decode", "sum", "middle" (decode-sum-encode) or "step".
        dtype: of the dense tensor.
        numel: N.
        moved_nbytes: bytes read once and written once.
        kernel: the operation as users get it.
        reference: the plain torch form, or None where the kernel is torch's own operation.
        limit: largest ratio to a copy that issue and documentation promise, or None.
        peers: other packages' operations that do the same job, by name.
    """

    name: str
    direction: str
    dtype: torch.dtype
    numel: int
    moved_nbytes: int
    kernel: Call
    reference: Call | None = None
    limit: float | None = None
    peers: dict[str, Call] = field(default_factory=dict)


def _limit(codec: Codec) -> float | None:
    if isinstance(codec, Blockwise | Cast):
        return 2.0
    return 4.0 if isinstance(codec, Hadamard | TopK) else None


@dataclass(frozen=True)
class Plain:
    """A codec's plain torch form; `middle` is there where the kernel is fused."""

    encode: Call | None = None
    decode_into: Callable[[Tensor, Tensor], object] | None = None
    middle: Callable[[Tensor], object] | None = None


def _plain_blockwise(codec: Blockwise, x: Tensor) -> Plain:
    shape = codec._shape(x.numel())

    def encode() -> object:
        drawn = None
        if codec.rounding == "stochastic":
            drawn = _plain_uniform(shape[0] * shape[1])
        return blockwise_reference.encode(x, *shape, drawn)

    return Plain(encode, lambda rows, out: blockwise_reference.decode(rows, out, *shape))


def _plain_hadamard(codec: Hadamard, x: Tensor) -> Plain:
    groups, layout = codec.num_groups(x.numel()), codec.layout
    plain = hadamard_reference
    return Plain(
        lambda: plain.encode(x, groups, layout),
        lambda rows, out: plain.decode(rows, out, groups, layout),
        lambda wires: plain.decode_sum_encode(wires, groups, layout, "fp32", x.dtype),
    )


def _plain_topk(codec: TopK, x: Tensor) -> Plain:
    args = codec.geometry(x.numel()), codec.quant, codec.level
    return Plain(
        lambda: topk_reference.encode(x, *args),
        lambda rows, out: topk_reference.decode(rows, out, *args),
    )


def _plain_uniform(numel: int) -> Tensor:
    return random_reference.uniform(torch.arange(numel), KEY.run_key, KEY.tensor, KEY.step)


def _plain(codec: Codec, x: Tensor) -> Plain:
    if isinstance(codec, Blockwise):
        return _plain_blockwise(codec, x)
    if isinstance(codec, Hadamard):
        return _plain_hadamard(codec, x)
    return _plain_topk(codec, x) if isinstance(codec, TopK) else Plain()


def _plain_calls(plain: Plain, wires: Tensor, out: Tensor) -> dict[str, Call | None]:
    """Return the plain form of each direction (None: the codec has no other)."""
    into, middle = plain.decode_into, plain.middle
    if into is None:
        return dict.fromkeys(("encode", "decode", "sum", "middle"))

    def sum_() -> Tensor:
        total = torch.zeros(out.shape[1])
        row = torch.empty(1, out.shape[1])
        for wire in wires:
            into(wire[None], row)
            total.add_(row[0])
        return total

    return {
        "encode": plain.encode,
        "decode": lambda: into(wires[:1], out),
        "sum": sum_,
        "middle": None if middle is None else lambda: middle(wires),
    }


def codec_cases(name: str, numel: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the directions of a codec on a normal tensor of `numel` elements."""
    codec = CODECS[name]
    if isinstance(codec, Subspace):
        numel -= numel % DIM
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    wire = codec.encode(x)
    wires = wire.repeat(SUMMED, 1)
    message, row = torch.empty_like(wire), torch.empty(1, numel, dtype=dtype)
    dense, sent = x.nbytes, wire.nbytes
    plain = _plain_calls(_plain(codec, x), wires, row)
    calls: dict[str, tuple[int, Call]] = {
        "encode": (dense + sent, lambda: codec.encode(x, out=message)),
        "decode": (dense + sent, lambda: codec.decode(wires[:1], numel, dtype, out=row)),
        "sum": (SUMMED * sent + 4 * numel, lambda: codec.decode_sum(wires, numel, dtype)),
    }
    if isinstance(codec, Hadamard):
        calls["middle"] = (
            (SUMMED + 1) * sent,
            lambda: codec.decode_sum_encode(wires, numel, dtype, out=message),
        )
    for direction, (moved, call) in calls.items():
        # The promise is on one message; sums of four do four times the arithmetic.
        limit = _limit(codec) if direction in ("encode", "decode") else None
        yield Case(
            name=name, direction=direction, dtype=dtype, numel=numel, moved_nbytes=moved,
            kernel=call, reference=plain[direction], limit=limit,
        )  # fmt: skip


def step_cases(name: str, numel: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a fused step with gradients (or a delta) of `dtype`."""
    draw = torch.Generator().manual_seed(0)
    g = torch.randn(numel, generator=draw).to(dtype)
    if name.startswith("mask"):
        yield from _mask_cases(name, g.float().abs(), dtype)
    elif name == "feedback-topk":
        yield _feedback_case(name, g)
    elif name.startswith("eco"):
        yield _eco_case(name, g)
    else:
        yield _adams_case(name, g)


def _mask_cases(name: str, statistic: Tensor, dtype: torch.dtype) -> Iterator[Case]:
    numel, k = statistic.numel(), max(1, statistic.numel() // 100)
    index = adams.largest(statistic, k)
    if name == "mask-select":
        yield Case(
            name=name, direction="step", dtype=dtype, numel=numel,
            moved_nbytes=4 * numel + 8 * k, kernel=lambda: adams.largest(statistic, k),
            reference=lambda: adams_reference.largest(statistic, k), limit=4.0,
        )  # fmt: skip
        return
    bits = name == "mask-bits"
    codec = Bitmask(k=k, form="bits" if bits else "index12")
    plain = bitmask_reference
    wire = codec.encode_index(index, numel)
    out = torch.empty_like(wire)
    encode, decode = (
        (bitmask.to_bits, bitmask.from_bits) if bits else (bitmask.to_index12, bitmask.from_index12)
    )
    slow = (plain.to_bits, plain.from_bits) if bits else (plain.to_index12, plain.from_index12)
    moved = 8 * k + wire.nbytes
    yield Case(
        name=name, direction="encode", dtype=dtype, numel=numel, moved_nbytes=moved,
        kernel=lambda: encode(index, numel, out), reference=lambda: slow[0](index, numel),
    )  # fmt: skip
    yield Case(
        name=name, direction="decode", dtype=dtype, numel=numel, moved_nbytes=moved,
        kernel=lambda: decode(wire, numel, k), reference=lambda: slow[1](wire, numel, k),
    )  # fmt: skip


def _feedback_case(name: str, delta: Tensor) -> Case:
    codec, numel = TopK(k=64), delta.numel()
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    fresh = torch.empty_like(residual)
    geo = codec.geometry(numel)
    out = torch.empty(topk.wire_nbytes(geo, codec.quant), dtype=torch.uint8)
    return Case(
        name=name, direction="step", dtype=delta.dtype, numel=numel,
        moved_nbytes=delta.nbytes + 2 * residual.nbytes + out.nbytes,
        kernel=lambda: codec.encode_feedback(delta, residual, 0.95, new_residual=fresh, out=out),
        reference=lambda: topk_reference.feedback(delta, residual, 0.95, geo, "sym", codec.level),
        limit=4.0,
    )  # fmt: skip


def _adams_case(name: str, g: Tensor) -> Case:
    numel, h = g.numel(), adams.Step(lr=1e-3)
    theta, m, r = (torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(3))
    if name == "adams-step":
        return Case(
            name=name, direction="step", dtype=g.dtype, numel=numel,
            moved_nbytes=g.nbytes + 16 * numel, kernel=lambda: adams.adams_(theta, m, g, h),
            reference=lambda: adams_reference.adams(theta, m, g, h), limit=4.0,
        )  # fmt: skip
    index = adams.largest(r, max(1, numel // 100))
    mean = m[index].clone()
    statistic = torch.empty(numel)
    args = (theta, m, g, r, index, mean, None, h)
    return Case(
        name=name, direction="step", dtype=g.dtype, numel=numel,
        moved_nbytes=g.nbytes + 28 * numel + 12 * index.numel(),
        kernel=lambda: adams.sweep_(*args, statistic=statistic),
        reference=lambda: adams_reference.sweep(*args, statistic), limit=4.0,
    )  # fmt: skip


def _eco_case(name: str, g: Tensor) -> Case:
    fmt = "int4" if "int4" in name else "fp8_e4m3"
    columns = DIM
    grad = g[: g.numel() - g.numel() % columns].view(-1, columns)
    rows = grad.shape[0]
    quantizer = eco.Quantizer(fmt)
    key = KEY if "-sr" in name else None
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    codes, scales = eco.quantize(weights, quantizer)
    m, v = torch.zeros(rows, columns), torch.full((rows, columns), 1e-4)
    h = eco.Step(lr=1e-3, b1=0.9, b2=0.95, eps=1e-8, c1=0.1, c2=0.05, inject=1.0)

    def plain() -> object:
        drawn = None
        if key is not None:
            drawn = _plain_uniform(grad.numel()).view(rows, columns)
        return eco_reference.step(codes, scales, grad, m, v, quantizer, h, drawn)

    return Case(
        name=name, direction="step", dtype=g.dtype, numel=grad.numel(),
        moved_nbytes=grad.nbytes + 2 * (codes.nbytes + scales.nbytes + m.nbytes + v.nbytes),
        kernel=lambda: eco.step_(codes, scales, grad, m, v, quantizer, h, key),
        reference=plain, limit=4.0,
    )  # fmt: skip
