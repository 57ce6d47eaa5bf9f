"""What every codec must keep, as functions that raise AssertionError: for tests of any codec.

    for check in contracts.CHECKS:
        check(codec, x)

Legend: `N` elements, `W` wire bytes, `R` messages.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs.protocol import Codec
from thinwire.errors import ThinwireError

__all__ = ["CHECKS", "check_fuzz", "same_bits"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two floating tensors agree bit for bit, any NaN equal to any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _decode_fp32(codec: Codec, wire: Tensor, x: Tensor) -> Tensor:
    """Return decoded values in fp32, rounded to x's dtype only where that is what travels."""
    n = x.numel()
    as_is = codec.wire_nbytes(n, torch.float32) != codec.wire_nbytes(n, x.dtype)
    return codec.decode(wire, n, x.dtype if as_is else torch.float32).float()


def check_wire(codec: Codec, x: Tensor) -> None:
    """The buffer is contiguous uint8 of exactly the promised length."""
    wire = codec.encode(x)
    assert wire.dtype == torch.uint8
    assert wire.shape == (codec.wire_nbytes(x.numel(), x.dtype),)
    assert wire.is_contiguous()
    assert wire.device == x.device


def check_deterministic(codec: Codec, x: Tensor) -> None:
    """Equal input gives equal bytes; input and layout in memory are left alone."""
    before = x.clone()
    wire = codec.encode(x)
    assert same_bits(x, before)
    assert torch.equal(codec.encode(x), wire)
    twisted = torch.stack([x.reshape(-1)] * 2, 1)[:, 0]
    assert torch.equal(codec.encode(twisted), wire)


def check_out(codec: Codec, x: Tensor) -> None:
    """Encode and decode write into buffers of the caller, at any byte offset and row stride."""
    n, wire = x.numel(), codec.encode(x)
    message = torch.full((wire.numel() + 7,), 255, dtype=torch.uint8)
    section = message[3 : 3 + wire.numel()]
    assert codec.encode(x, out=section) is section
    assert torch.equal(section, wire)
    assert message[:3].eq(255).all()
    assert message[3 + wire.numel() :].eq(255).all()
    plain = codec.decode(wire, n, x.dtype)
    assert plain.shape == (n,)
    assert plain.dtype == x.dtype
    assert same_bits(codec.decode(section, n, x.dtype), plain)
    rows = torch.full((2, n + 5), float("nan"), dtype=x.dtype)
    target = rows[:, 2 : 2 + n]
    codec.decode(torch.stack([wire, wire]), n, x.dtype, out=target)
    assert all(same_bits(row, plain) for row in target)
    assert rows[:, :2].isnan().all()
    assert rows[:, 2 + n :].isnan().all()


def check_sum(codec: Codec, x: Tensor) -> None:
    """`decode_sum` adds decoded messages in rank order in fp32."""
    n = x.numel()
    wires = torch.stack([codec.encode(x), codec.encode(x.flip(0)), codec.encode(x)])
    rows = _decode_fp32(codec, wires, x)
    total = codec.decode_sum(wires, n, x.dtype)
    assert same_bits(total, (rows[0] + rows[1]) + rows[2])


def check_error(codec: Codec, x: Tensor) -> None:
    """Finite input comes back within the declared error; exact codecs return it."""
    if not bool(torch.isfinite(x).all()) or not x.numel():
        return
    y = _decode_fp32(codec, codec.encode(x), x)
    x = x.reshape(-1)
    if codec.facts.exact:
        assert torch.equal(y, x.float())
    bound = codec.facts.max_error
    top = x.float().abs().max().item()
    # Below 2^-14 the 16-bit metadata of some codecs are subnormal: the bound is for normal data.
    if bound is not None and 2.0**-10 <= top <= 6e4:
        worst = (y - x.float()).abs().max().item()
        assert worst <= bound * top + 1e-30, (worst, bound * top)


def check_nonfinite(codec: Codec, x: Tensor) -> None:
    """NaN and infinity are flagged by a codec that says so; finite input is not."""
    wire = codec.encode(x)
    count = codec.nonfinite_count(wire, x.numel(), x.dtype)
    if not codec.facts.flags_nonfinite:
        assert count == 0
    elif not bool(torch.isfinite(x).all()):
        assert count > 0


def check_copy(codec: Codec, x: Tensor) -> None:
    """A codec is a value: hashable, equal to its copy."""
    assert hash(codec) == hash(copy.deepcopy(codec))
    assert codec == copy.deepcopy(codec)


CHECKS: tuple[Callable[[Codec, Tensor], None], ...] = (
    check_wire,
    check_deterministic,
    check_out,
    check_sum,
    check_error,
    check_nonfinite,
    check_copy,
)


def check_fuzz(codec: Codec, numel: int, buffers: int, seed: int = 0) -> tuple[int, int]:
    """Decode random and truncated buffers: a ThinwireError, or numbers of the right shape.

    Returns:
        How many buffers decoded and how many were refused.
    """
    generator = torch.Generator().manual_seed(seed)
    nbytes = codec.wire_nbytes(numel, torch.float32)
    decoded = 0
    for i in range(buffers):
        length = nbytes if i % 4 else int(torch.randint(0, nbytes + 9, (), generator=generator))
        wire = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        try:
            y = codec.decode(wire, numel, torch.float32)
        except ThinwireError:
            continue
        assert y.shape == (numel,)
        assert length == nbytes
        if codec.facts.flags_nonfinite:
            assert not y.isinf().any()
        decoded += 1
    return decoded, buffers - decoded
